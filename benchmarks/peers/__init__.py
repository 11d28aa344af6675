"""Steps of other libraries beside torch by hand and beside ours: CPU time, Python calls, start, memory, exactness.

    python -m benchmarks.peers [SYSTEM[=PYTHON]…] [--layouts zero3 …] [--shapes 24x64 …] [--with clip …] [--pairs 40]

Each system is one file beside this one. It runs in the environment that has it: ``deepspeed=/env/bin/python`` names
another interpreter than this one; ``pip install`` takes what a file's ``PACKAGES`` lists, beside the same torch. Each
question (layout, shape, option) starts two processes over gloo, or over NCCL where two GPUs are seen. There the system
and torch by hand train the same Llama of transformers on the same rows, in rounds that alternate, so that the machine's
drift hits both alike; a round gives a ratio of both processes' CPU time, and systems compare by their ratios to torch
by hand. Start and memory come from a run of each alone. What a system cannot do is printed in its own words.

Exactness is the loss of the fourth step against one process, once with all labels, once with three tenths of them
ignored, most of these on one rank: what people's loops do with a mean of means.
"""
