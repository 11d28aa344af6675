"""The scripts of ``examples/`` for loops of one's own run, shrunk, and learn; every rank sees one loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHRUNK = {
    "vit_loop": {"steps": 10, "rows": 8, "size": 8, "width": 16, "layers": 2},
    "diffusion_loop": {"steps": 12, "rows": 8, "dim": 16, "layers": 2},
    "seq2seq_loop": {"steps": 8, "rows": 4, "length": 6, "width": 16, "layers": 1},
}


def trained(name):
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    result = module.train(**SHRUNK[name])
    return result if isinstance(result, tuple) else (result, None)


@pytest.mark.all
@pytest.mark.parametrize("name", SHRUNK)
def test_an_example_learns_and_ranks_agree(name, spmd):
    first, second = spmd(2, trained, name)
    assert first == second
    losses, averaged = first
    assert len(losses) == SHRUNK[name]["steps"]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert averaged is None or averaged < losses[0]


def test_every_loop_among_the_examples_is_run():
    assert {path.stem for path in EXAMPLES.glob("*_loop.py")} == set(SHRUNK)
