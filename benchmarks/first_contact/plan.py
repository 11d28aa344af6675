"""The steps of first contact, in order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from .child import Outcome
from .machine import machine, need
from .runner import ROOT, Step

KERNELS = (
    ("cuda flash", "bfloat16"),
    ("cuda flash", "float16"),
    ("cuda efficient", "float32"),
    ("cuda efficient", "bfloat16"),
    ("cpu flash", "float32"),
)


def steps(folder: Path, *, patience: float = 1.0) -> list[Step]:
    """List the steps.

    Args:
        folder: holds the results of steps before.
        patience: factor on their time limits.
    """
    return [replace(step, limit=patience * step.limit) for step in _steps(folder)]


def _steps(folder: Path) -> list[Step]:
    from .loops import PAIRS
    from .parity import CASES
    from .ranks import COLLECTIVES, LAYOUTS
    from .speed import SETTINGS

    results = str(folder / "results.json")
    return [
        Step("facts", "facts:facts", limit=120),
        *(Step(f"parity/{name}", "parity:case", {"name": name}, 180) for name in CASES),
        Step("parity/dropout", "parity:dropout"),
        Step("parity/checkpoint", "parity:checkpoint"),
        Step("parity/generation", "parity:generation"),
        Step("parity/optimizer state 8bit", "parity:low_bit", {"state": "8bit"}, 180),
        Step("parity/optimizer state 4bit", "parity:low_bit", {"state": "4bit"}, 180),
        *(Step(f"gloo/{name}", "ranks:collective", {"name": name}, 100) for name in COLLECTIVES),
        *(Step(f"ranks/{name}", "ranks:layout", {"name": name, "results": results}, 300) for name in LAYOUTS),
        Step("tests/gpu", "plan:gpu_tests", limit=420),
        Step("kernels/table", "kernels:table"),
        *(Step(f"kernels/{name} {dtype}", "kernels:fused", {"name": name, "dtype": dtype}) for name, dtype in KERNELS),
        *(Step(f"loops/{name}", "loops:compare", {"name": name}, 240) for name in PAIRS),
        *(Step(f"speed/{name}", "speed:measure", {"name": name}, 300) for name in SETTINGS),
    ]


def gpu_tests() -> Outcome:
    """Run tests/gpu with pytest, where it is installed."""
    need("pytest", "tests/gpu")
    machine().needs_cuda("tests/gpu are collected where nvidia-smi sees a GPU")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    command += ["--ignore=tests/gpu/test_techniques.py"]  # its cases are steps of their own
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()
    print(done.stdout)
    assert done.returncode == 0, "\n".join(["pytest failed:", *said[-10:]])
    return {"summary": said[-1]}, [said[-1]]
