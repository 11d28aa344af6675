"""First contact with a GPU: every technique against plain torch, kernels, speed and memory, in one command.

``python -m benchmarks.first_contact`` (``make gpu``) runs the steps of ``plan`` in order, each in a process of its own;
``--dry`` runs them on the pretend device with tiny sizes. docs/gpu.md says how it is used.
"""
