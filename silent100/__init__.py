"""A corpus of silent faults in distributed training, and a scorer of judges that look for them.

Faults of distributed training that raise no error, and a scorer of tools that look for them.

    python -m silent100 losses-1e-2 losses-1e-4 norms checksums meshwright     # the judges that come along
    python -m silent100 --cases FOLDER --only 'tp-*' --jobs 2 "python my_judge.py"
    python -m silent100 --prove

A **case** is a folder. `case.py` is one script: `--one` is one process, the truth; under `torchrun` it is the sound
twin; `--faulty` plants the fault; `--save DIR` writes each rank's state. `case.toml` has `id`, `title`, `source`,
`edge`, `axis`, `processes`, `tier` (2: no exact twin), and `[answer]` with `place` (a regular expression), `step`,
`ranks`, `kind`. A sound program that looks suspicious has `sound = true` and no `--faulty`.

A **judge** is a command. It is given `--one COMMAND --many COMMAND --keep FOLDER`, reads neither source nor command
line, and answers in its last line: `{"verdict": "fault", "place": "layers.3.mlp.down", "step": 1, "kind": "missing
reduction", "ranks": [0]}`, or `{"verdict": "sound"}`. Each case is asked twice, with the sound twin and with the
faulty run, in an order that the case draws: scripts are copied under one name, nothing in them is called faulty, and
the command lines are alike. FOLDER is the case's own, for what `--one` gave. A command whose last word is `--serve`
is started once, and is given a question a line: `{"one": COMMAND, "many": COMMAND, "keep": FOLDER}`.

**Right** is: found; the place matches whole; step, kind and set of ranks are equal. A fault seen in a sound twin or
sound program is a false alarm. Nothing here imports meshwright.

**Other tools** (2026-11-30, torch 2.13.0). TrainCheck 0.2.0, given the one process as reference, on six faults and nine
sound runs of `cases`: it found 5, placed 2, with 7 false alarms and 167 s a question; in five of the six it said the
same of the fault as of its twin. spmd_types 0.3.1 on the three scripts in `annotated`: it found 2, named no place, and
raised no false alarm; what a backward loses it does not see.
"""
