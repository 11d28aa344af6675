"""The house keeps its shape (docs/architecture.md): .importlinter checks the floors, this what it cannot say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

HOUSE = Path(meshwright.__file__).parent
FILES = {path.relative_to(HOUSE).as_posix(): path for path in sorted(HOUSE.rglob("*.py"))}
LONGEST = 320


def reached(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Dotted names that code of ``package`` imports or reaches when it runs; imports for annotations alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from reached(ast.Module(node.orelse, []), package)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        yield from reached(node, package)


def names_in(place: str) -> set[str]:
    package = ".".join(["meshwright", *Path(place).parts[:-1]])
    return set(reached(ast.parse(FILES[place].read_text(encoding="utf-8")), package))


def is_under(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def techniques() -> list[str]:
    """The files that order imports and that have an ``apply`` of their own."""
    ordered = names_in("distributed/order.py")
    found = (place for place in FILES if "meshwright." + place.removesuffix(".py").replace("/", ".") in ordered)
    bodies = {place: ast.parse(FILES[place].read_text(encoding="utf-8")).body for place in found}
    return [place for place, body in bodies.items() if any(isinstance(node, ast.FunctionDef) and node.name == "apply" for node in body)]


def test_the_tests_import_this_checkout():
    source = Path(__file__).resolve().parents[2] / "src" / "meshwright"
    assert source == HOUSE.resolve(), f"the environment holds the meshwright of {HOUSE}: run make test, or install this checkout"


def test_no_file_outgrows_its_reader():
    lengths = {place: len(path.read_text(encoding="utf-8").splitlines()) for place, path in FILES.items()}
    assert {place: length for place, length in lengths.items() if length > LONGEST} == {}, "a noun is missing"


def test_torch_distributed_stays_on_its_floors():
    """Outside distributed/ and checkpoint/, ranks agree through distributed/agree."""
    above = [place for place in FILES if not place.startswith(("distributed/", "checkpoint/"))]
    reached = {place: sorted(name for name in names_in(place) if is_under(name, "torch.distributed")) for place in above}
    assert len(above) > 100 and {place: names for place, names in reached.items() if names} == {}


def test_techniques_do_not_know_each_other():
    files = techniques()
    assert len(files) >= 2, "order names no techniques: this test has lost its subject"
    modules = {place: "meshwright." + place.removesuffix(".py").replace("/", ".") for place in files}
    for place, own in modules.items():
        others = {*modules.values(), "meshwright.distributed.order", "meshwright.distributed.parallel_model"} - {own}
        known = sorted(other for other in others if any(is_under(name, other) for name in names_in(place)))
        assert not known, f"{place} imports {known}: what two techniques share belongs in a file of its own"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("def f():\n    from torch.distributed.tensor import DTensor", "torch.distributed.tensor.DTensor"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("from . import ddp", "house.floor.ddp"),
        ("from .ddp import apply", "house.floor.ddp.apply"),
        ("from ..core import axes", "house.core.axes"),
    ],
)
def test_every_way_to_import_is_seen(code, name):
    assert name in set(reached(ast.parse(code), "house.floor"))


def test_imports_for_annotations_are_not_seen():
    code = "if TYPE_CHECKING:\n    from torch.distributed import DeviceMesh\nelse:\n    import json"
    assert set(reached(ast.parse(code))) == {"json"}
