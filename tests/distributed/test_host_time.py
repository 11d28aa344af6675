"""A step costs the host the same for each block, at any depth, and no more than torch alone."""

from __future__ import annotations

import pytest
import torch
from support.host_time import AXES, laid_out, own_calls
from support.step_counts import CHANCE, TORCH, WAYS, counted, largest

pytestmark = pytest.mark.all


def calls_of(axis, blocks):
    return own_calls(laid_out(axis, blocks))


@pytest.mark.parametrize("axis", AXES)
def test_calls_of_a_step_are_linear_in_blocks(axis, spmd):
    for few, more, most in zip(*(spmd(2, calls_of, axis, blocks) for blocks in (4, 8, 12)), strict=True):
        beyond = {name: most[name] - 2 * more[name] + few[name] for name in most}
        assert {name: count for name, count in beyond.items() if count > 0} == {}


of_torch = pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"the counts are of torch {TORCH}")


@of_torch
@pytest.mark.first("ddp", "zero3, one unit", "tp and sp", "pp, 1f1b", "cp")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_grows_by_no_call_operator_or_message(way, spmd):
    """A step that got leaner brings smaller numbers into the table."""
    found, known = largest(spmd(2, counted, way, True)), WAYS[way].ours
    assert found.calls <= known.calls + CHANCE
    assert found[1:3] == known[1:3]


@of_torch
@pytest.mark.parametrize("way", WAYS)
def test_a_step_makes_hardly_more_python_calls_than_torch_alone(way, spmd):
    ours, bare = (largest(spmd(2, counted, way, is_ours)) for is_ours in (True, False))
    assert ours.norm == pytest.approx(bare.norm, rel=1e-4), "they do not compute the same"
    assert ours.calls <= WAYS[way].share * bare.calls
