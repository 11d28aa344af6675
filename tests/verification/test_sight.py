"""A layout that lets tokens see others than in one process is described in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.mixing import LONGEST, VOCABULARY, Model, packed, windowed
from torch import nn

from meshwright import Layout, verify
from meshwright.distributed import order
from meshwright.distributed.context import methods, runtime
from meshwright.introspection.mixing.masks import KeyRanges, RowMask
from meshwright.verification.problem import Problem, RandomBatches
from meshwright.verification.sight import Sight, sight_alone, sight_laid_out, words

Fault = AbstractContextManager[Any]
BATCHES = RandomBatches(VOCABULARY, rows=2, seq_len=20)
assert BATCHES.seq_len + 6 < LONGEST


class Packed(Model):
    def __init__(self):
        super().__init__(packed)


class Windowed(Model):
    def __init__(self):
        super().__init__(windowed)


def problem(model: Callable[[], nn.Module], method: str = "all_gather") -> Problem:
    return Problem(model, BATCHES, 1, techniques={"context_parallel_method": method}, dtype="float64")


def border_lost() -> object:
    return patch.object(
        runtime.ContextRuntime, "_by_rule", lambda self, rule, rows: RowMask(rule.places, is_known=True)
    )


def window_off_by_one() -> Fault:
    correct = methods.Context.own_reach.fget

    def wider(context: methods.Context) -> KeyRanges:
        reach = correct(context)
        return KeyRanges((reach.lower - 1).clamp(min=0), reach.upper)

    return patch.object(methods.Context, "own_reach", property(wider))


def window_cut() -> Fault:
    correct = methods.Context.own_reach.fget
    own_alone = property(lambda context: KeyRanges(context.rows.own, correct(context).upper))
    return patch.object(methods.Context, "own_reach", own_alone)


FAULTS = {
    "a border": (border_lost, Packed, r"in attentions.0, row \d: document -?\d sees document -?\d"),
    "a window too wide": (window_off_by_one, Windowed, "tokens .* see tokens .*, which one process does not"),
    "no window": (window_cut, Windowed, "tokens .* do not see tokens .*, which one process does"),
}


def laid_out_with(fault: Callable[[], Fault] | None, made: Problem) -> Sight:
    """The sight of a layout; with a fault, one that no rehearsal refused."""
    if fault is None:
        return sight_laid_out(made, Layout(dp_shard=1, cp=2))
    unproven = patch.object(order, "prove", lambda facts, plan: {})
    with unproven, fault():
        return sight_laid_out(made, Layout(dp_shard=1, cp=2))


@pytest.mark.all
@pytest.mark.parametrize("method", ["all_gather", "ring", "halo"])
@pytest.mark.parametrize("model", [Packed, Windowed])
def test_on_a_layout_tokens_see_what_they_see_in_one_process(spmd, model, method):
    made = problem(model, method)
    (alone,) = spmd(1, sight_alone, made)
    for found in spmd(2, laid_out_with, None, made):
        assert alone and words(found, alone, made.batch(0)) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_words(spmd, name):
    fault, model, said = FAULTS[name]
    made = problem(model)
    (alone,) = spmd(1, sight_alone, made)
    for found in spmd(2, laid_out_with, fault, made):
        assert list(found) == list(alone) and re.search(said, words(found, alone, made.batch(0)))


def test_words_name_the_first_block_and_row():
    one = {"blocks.0": torch.eye(3, dtype=torch.bool)[None], "blocks.1": torch.ones(1, 3, 3, dtype=torch.bool).tril()}
    other = {"blocks.0": one["blocks.0"], "blocks.1": one["blocks.1"].clone()}
    other["blocks.1"][0, 2, 1] = False
    assert words(other, one, {}) == "in blocks.1, row 0: tokens 2 do not see tokens 1, which one process does"
    assert words(one, one, {}) == ""


def test_an_equal_layout_says_nothing(pool):
    report = verify(Packed, Layout(dp_shard=1, cp=2), BATCHES, steps=1, dtypes=("float64",), pool=pool)
    assert report and not any("see tokens" in note for c in report.comparisons for note in c.notes)
