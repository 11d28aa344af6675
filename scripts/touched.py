"""Which tests a change touches: those whose files import, at however many removes, a module that changed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.suite import FILE, read_costs  # noqa: E402

import meshwright  # noqa: E402

__all__ = ["BASE", "FILE", "touched"]

PUBLIC = {f"meshwright.{name}": home for name, home in meshwright._HOME.items()}
"""Names of the package itself, which it loads when they are asked for -> the module of each."""
BASE = "# The last whole run was at "


def touched(tests: Iterable[str], seconds: float) -> tuple[list[str], int]:
    """Choose, of tests that make test leaves out, those that the changes since the last whole run touch, the nearest
    first.

    As many as fit; and how many do not.

    Args:
        seconds: of CPU.
    """
    distances, costs = distances_of(changed_files()), read_costs()
    near = sorted((distances[file], test) for test in tests if (file := test.partition("::")[0]) in distances)
    found: list[str] = []
    spent = 0.0
    for _, test in near:
        cost = costs[test][0]
        if spent + cost <= seconds:
            found.append(test)
            spent += cost
    return found, len(near) - len(found)


def changed_files() -> list[str]:
    """Since the commit that costs.txt names; in a history that does not have it, those of the last commit."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    bases = [line.removeprefix(BASE).split(",", 1)[0] for line in lines if line.startswith(BASE)]
    for base in (*bases, "HEAD~1"):
        done = subprocess.run(
            ["git", "diff", "--name-only", base], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.split()
    return []


def distances_of(files: Iterable[str]) -> dict[str, int]:
    """Test file -> imports between it and the nearest of the files; 0: it is one of them.

    What the package itself imports leads nowhere, since it loads each of its names when that is asked for: else all
    would touch all.
    """
    import grimp

    graph = grimp.build_graph("meshwright")
    files = set(files)
    distance: dict[str, int] = {}
    layer = [name for name in map(module_of, files) if name in graph.modules]
    steps = 0
    while layer:
        distance |= dict.fromkeys(layer, steps)
        steps += 1
        importers = {importer for module in layer for importer in graph.find_modules_that_directly_import(module)}
        layer = [module for module in importers - {"meshwright"} if module not in distance]
    found = {}
    for path in (ROOT / "tests").glob("*/test_*.py"):
        modules, own = reached_from(path)
        near = [1 + distance[module] for module in modules if module in distance]
        near += [int(file != path) for file in own if file.relative_to(ROOT).as_posix() in files]
        if near:
            found[path.relative_to(ROOT).as_posix()] = min(near)
    return found


def reached_from(path: Path) -> tuple[set[str], set[Path]]:
    """Modules that a test file imports, also by way of other files of the tests; and these files, itself among them."""
    modules: set[str] = set()
    own = {file for file in (path, path.parent / "conftest.py") if file.exists()}
    waiting = list(own)
    while waiting:
        for name in imports_of(waiting.pop()):
            modules.add(name)
            places = (folder / f"{name.replace('.', '/')}.py" for folder in (ROOT / "tests", path.parent))
            new = [place for place in places if place.exists() and place not in own]
            own.update(new)
            waiting += new
    return modules, own


@cache
def imports_of(path: Path) -> frozenset[str]:
    """What a file names in its imports: modules, and what may be one in them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return frozenset(PUBLIC.get(name, name) for name in found)


def module_of(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
