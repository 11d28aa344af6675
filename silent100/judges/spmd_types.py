"""Judge by the type checker of PyPI's ``spmd_types``, for scripts that are annotated as its guide says.

``silent100/annotated`` has some: ``python -m silent100 --cases silent100/annotated spmd-types``. The checker follows
the forward, stops at the first error, and believes what is written of a script's own autograd functions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Print whether an error of types ended the ranks' run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--many")
    parser.add_argument("--keep")
    parser.add_argument("--python", default=os.environ.get("SPMD_TYPES_PYTHON"), help="one that has spmd_types")
    given = parser.parse_args()
    if not given.python:
        sys.exit("name a Python that has spmd_types, by --python or SPMD_TYPES_PYTHON")
    words = shlex.split(given.many)
    script = next(word for word in words if word.endswith(".py"))
    if "spmd_types" not in Path(script).read_text(encoding="utf-8"):
        sys.exit("this case is not annotated with types; see silent100/annotated")
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run([given.python, *words[1:]], env=environment, capture_output=True, text=True, errors="replace")
    errors = re.findall(r"^\[rank(\d+)\]: .*SpmdTypeError: (.+)", done.stderr, re.M)
    if done.returncode and not errors:
        sys.exit(done.stderr[-1000:])
    answer: dict[str, Any] = {"verdict": "sound"}
    if errors:
        # An error names an operator and its types: no module. It stops the first step
        ranks = sorted({int(rank) for rank, _ in errors})
        answer = {"verdict": "fault", "step": 1, "ranks": ranks, "words": errors[0][1]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
