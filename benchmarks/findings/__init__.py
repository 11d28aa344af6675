"""Reproduce what the judge found in other trainers: ``python -m benchmarks.findings [NAME …]`` (docs/findings.md).

Each finding is a script that trains a few rows in one process, or in several under torchrun, as its users would; it
knows nothing of meshwright. Both are observed, and blamed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A script, the flags by which one process and several do what their user takes for the same, and the answer.

    Attributes:
        words: what the finding must say; empty where the runs are the same.
        observe: flags of ``meshwright observe``.
    """

    script: str
    one: str
    many: str
    words: str
    processes: int = 2
    observe: str = ""


GATE = r"step 1 · model\.layers\.1\.mlp\.gate\.weight: gradients differ"
SCALE = "step 1 · everything: gradients differ .* rows count by other shares of the loss"
CASES = {
    "uneven-fsdp2": Case("uneven_labels.py", "", "--with fsdp2", SCALE),
    "uneven-pipeline": Case("uneven_labels.py", "", "--with pipeline", SCALE),
    "uneven-accelerate": Case("uneven_labels.py", "", "--with accelerate", SCALE),
    "uneven-fabric": Case("uneven_labels.py", "", "--with fabric", SCALE),
    "last-batch": Case("epochs.py", "last", "last", "step 2 .* rank 1: 2 rows are not of this step"),
    "schedule": Case("epochs.py", "schedule", "schedule", "step 2 .* lr differs"),
    "shuffle": Case("epochs.py", "shuffle", "shuffle", "step 1 .* of 8 rows are missing"),
    "balance": Case("balance.py", "--rows 8", "--rows 4", GATE),
    "balance-accumulated": Case("balance.py", "--rows 8", "--rows 4 --accumulate 2", GATE, 1),
    "wrong-kernel": Case("kernel.py", "", "--compile", r"step 1 · 1\.scale: outputs differ .* 1.01 times", 1),
    "wrong-kernel-whole": Case("kernel.py", "", "--compile", "gradients differ", 1, "--parameters-alone"),
}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Observe a finding's runs in a folder; return what blame says."""
    case = CASES[name]
    python, environment = [sys.executable, "-m"], os.environ | {"OMP_NUM_THREADS": "1"}
    several = [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}", "--"]
    starts = {
        "one": ([sys.executable], case.one),
        "many": ([sys.executable] if case.processes == 1 else several, case.many),
    }
    for trace, (start, flags) in starts.items():
        noisy = ["--noisy", str(folder / "noisy")] if trace == "one" else case.observe.split()
        command = [*start, str(HERE / case.script), *flags.split()]
        words = [*python, "meshwright", "observe", str(folder / trace), *noisy, "--", *command]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    words = [*python, "meshwright", "blame", folder / "one", folder / "many", "--noisy", folder / "noisy", "--json"]
    return json.loads(subprocess.run(words, env=environment, capture_output=True, text=True).stdout)
