"""Which tests a change touches: those whose files import, at however many removes, a module that changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.suite import FILE, LISTED_SEC, read_costs  # noqa: E402

__all__ = ["BASE", "FILE", "LISTED_SEC", "touched"]

BASE = "# The last whole run was at "
UNKNOWN_SEC = 6.0
"""CPU seconds of a thorough test of which no cost was recorded, about."""


def touched(tests: Iterable[str], seconds: float) -> tuple[list[str], int]:
    """Of the tests those that the changes since the last whole run touch, the nearest first, as many as fit; and how many do not.

    Args:
        seconds: of CPU.
    """
    distances, costs = distances_of(changed_files()), read_costs()
    near = sorted((distances[file], test) for test in tests if (file := test.partition("::")[0]) in distances)
    found: list[str] = []
    spent = 0.0
    for _, test in near:
        cost = costs.get(test, UNKNOWN_SEC)
        if spent + cost <= seconds:
            found.append(test)
            spent += cost
    return found, len(near) - len(found)


def changed_files() -> list[str]:
    """Since the commit that costs.txt names; in a history that does not have it, those of the last commit."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    bases = [line.removeprefix(BASE).split(",", 1)[0] for line in lines if line.startswith(BASE)]
    for base in (*bases, "HEAD~1"):
        done = subprocess.run(["git", "diff", "--name-only", base], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.split()
    return []


def distances_of(files: Iterable[str]) -> dict[str, int]:
    """Test file -> imports between it and the nearest of the files; 0: it is one of them."""
    import grimp

    graph = grimp.build_graph("meshwright")
    files = set(files)
    layer = [name for name in map(module_of, files) if name in graph.modules]
    distance = dict.fromkeys(layer, 0)
    steps = 0
    while layer:
        steps += 1
        importers = {importer for module in layer for importer in graph.find_modules_that_directly_import(module)}
        layer = [module for module in importers if module not in distance]
        distance |= dict.fromkeys(layer, steps)
    found = {}
    for path in (ROOT / "tests").glob("*/test_*.py"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        near = [1 + steps for module, steps in distance.items() if module in text]
        if name in files or near:
            found[name] = 0 if name in files else min(near)
    return found


def module_of(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
