"""Over which ranks collectives go: groups that meet ranks which have nothing to add up are found, and no others."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.observation import groups
from meshwright.observation.findings import Off
from meshwright.observation.groups import (
    adds_up_around,
    counted_again,
    meets_strangers,
    sent,
    sums_a_copy,
    sums_copies,
    sums_strangers,
    sums_twice,
    unreduced,
)
from meshwright.observation.traces import Place

ROWS = ["ab", "ab", "cd", "cd"]
"""Ranks 0 and 1 have the same rows, and 2 and 3."""
EVERY, PAIRS, ACROSS = [[0, 1, 2, 3]] * 4, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]


def event(ranks: list[int], **other: Any) -> dict[str, Any]:
    usual = {"kind": "all_reduce", "module": "mix", "phase": "forward", "of": [], "bytes": 1200, "values": []}
    return {**usual, "ranks": ranks, **other}


def passes(groups: list[list[int]], rows: list[str] = ROWS, keys: str = "....", **other: Any) -> Any:
    """What four ranks did, of which each calls one collective over its group; a list has each rank's value."""
    steps = []
    for rank, group in enumerate(groups):
        own = {key: value[rank] if isinstance(value, tuple) else value for key, value in other.items()}
        given = {"ids": {"rows": [*rows[rank]], "ids": []}}
        gradients = event(group, phase="", of=["own.weight"])
        steps.append({"calls": [{"inputs": given}], "sent": [event(group, **own), gradients]})
    places = [{"own.weight": Place("mix.weight", 0, torch.tensor([ord(key)]))} for key in keys]
    return SimpleNamespace(own=steps, names=[{}] * 4, lengths=[{}] * 4, places=places)


@pytest.mark.parametrize(
    ("groups", "other", "is_found"),
    [
        (ACROSS, {}, True),
        (ACROSS, {"kind": "all_gather"}, True),
        (ACROSS, {"module": "mix.norm"}, True),
        (ACROSS, {"module": ""}, True),
        (ACROSS, {"module": "mixer"}, False),
        (ACROSS, {"phase": "backward"}, False),
        (PAIRS, {}, False),
        (EVERY, {}, False),
        (ACROSS, {"rows": ["a", "b", "c", "d"]}, False),
        (ACROSS, {"rows": ["a", "a", "a", "a"]}, False),
    ],
)
def test_a_group_in_a_forward_that_leaves_out_those_with_the_same_rows(groups, other, is_found):
    assert bool(meets_strangers(passes(groups, **other), "mix")) == is_found


@pytest.mark.parametrize(
    ("module", "other", "is_found"),
    [
        ("mix", {}, True),
        ("mix.gate", {}, True),
        ("mixer", {}, False),
        ("mix", {"module": ""}, False),  # a loss of the model's
        ("mix", {"kind": "all_gather"}, False),
        ("mix", {"phase": "backward"}, False),
    ],
)
def test_parts_that_are_added_up_in_a_module_or_around_it(module, other, is_found):
    assert adds_up_around(passes(EVERY, **other), module) == is_found


@pytest.mark.parametrize(
    ("values", "scale", "other", "is_found"),
    [
        ((7.0, 7.0, 5.0, 5.0), 0.5, {}, True),
        ((7.0, 7.0, 5.0, 5.0), 2.0, {}, False),
        ((7.0, 7.0, 7.0, 7.0), 0.5, {}, False),
        ((7.0, 6.0, 5.0, 4.0), 0.5, {}, False),
        ((7.0, 7.0, 5.0, 5.0), 0.5, {"kind": "broadcast"}, False),
        ((7.0, 7.0, 5.0, 5.0), 0.5, {"of": ["mix.weight"]}, False),
        ((7.0, 7.0, 5.0, 5.0), 0.5, {"rows": ["a", "b", "c", "d"]}, False),
    ],
)
def test_a_number_that_ranks_with_the_same_rows_each_add(values, scale, other, is_found):
    assert bool(counted_again(passes(EVERY, values=tuple([v] for v in values), phase="", **other), scale)) == is_found
    assert not counted_again(passes(PAIRS, values=tuple([v] for v in values), phase="", **other), scale)


@pytest.mark.parametrize(
    ("groups", "keys", "phase", "is_found"),
    [
        (ACROSS, "0101", "step", True),
        (ACROSS, "0101", "", False),
        (ACROSS, "0000", "step", False),
        (ACROSS, "0123", "step", False),
        (PAIRS, "0101", "step", False),
        (EVERY, "0101", "step", False),
    ],
)
def test_a_sum_over_copies_of_a_cut_parameter(groups, keys, phase, is_found):
    assert bool(sums_copies(passes(groups, keys=keys, phase=phase), "mix.weight")) == is_found


SAME, OWN, MIXED = ([7.0, 1.0],) * 4, ([7.0], [6.0], [5.0], [4.0]), ([7.0], [7.0], [5.0], [5.0])


@pytest.mark.parametrize(
    ("groups", "values", "other", "is_found"),
    [
        (PAIRS, MIXED, {}, True),
        (ACROSS, MIXED, {}, False),
        (PAIRS, OWN, {}, False),
        (PAIRS, SAME, {}, False),
        (EVERY, MIXED, {}, False),
        (PAIRS, MIXED, {"kind": "broadcast"}, False),
        (PAIRS, MIXED, {"phase": "backward"}, False),
        (PAIRS, MIXED, {"of": ["own.weight"]}, False),
    ],
)
def test_numbers_that_are_summed_over_ranks_which_have_them_in_common(groups, values, other, is_found):
    assert bool(sums_a_copy(passes(groups, values=values, **other), "forward")) == is_found


@pytest.mark.parametrize(
    ("groups", "keys", "name", "is_found"),
    [
        (ACROSS, "0011", "mix.weight", True),
        (EVERY, "0011", "mix.weight", True),
        (PAIRS, "0011", "mix.weight", False),
        (EVERY, "0000", "mix.weight", False),
        (EVERY, "0011", "mix.bias", False),
    ],
)
def test_gradients_that_are_summed_over_ranks_with_other_parts(groups, keys, name, is_found):
    assert bool(sums_strangers(passes(groups, keys=keys), {name})) == is_found


def test_gradients_that_are_summed_over_ranks_without_the_parameter():
    found = passes(EVERY)
    found.places[2].clear()
    assert sums_strangers(found, {"mix.weight"})


@pytest.mark.parametrize(("again", "is_found"), [([], False), (["other.weight"], False), (["own.weight"], True)])
def test_gradients_that_are_summed_twice(again, is_found):
    found = passes(EVERY)
    found.own[1]["sent"].append(event(EVERY[1], phase="backward", of=again))
    assert sums_twice(found, {"mix.weight"}) == is_found and not sums_twice(found, {"mix.weight", "mix.bias"})


def test_a_places_collectives_are_said():
    found = passes(ACROSS)
    assert sent(found, "mix", 1) == sent(found, "mix.weight", 1) == "all_reduce over ranks 1, 3 (1,200 B)"
    assert sent(found, "other", 1) == ""


@pytest.mark.parametrize(
    ("rows", "other", "kind"),
    [
        (("ab", "cd"), "b", "missing reduction"),
        (("ab", ""), "b", "tie broken"),
        (("ab", ""), "a", "missing reduction"),  # a replica without rows
    ],
)
def test_parts_of_a_sum_on_a_stage_that_is_given_no_rows_are_of_a_tie(rows, other, kind):
    values = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    own = [{"gradients": {"w": {"m": [v], "shape": [2], "dtype": "float32"}}, "sent": []} for v in values]
    found = SimpleNamespace(own=own, places=[{"w": Place("w")}] * 2, held=[{"w", "v", "a"}, {"w", "v", other}])
    found.counts = lambda: (Counter("abcd"), [*map(Counter, rows)])
    off = [Off("w", rank, v, values[0] + values[1], 1.0, Place("w")) for rank, v in enumerate(values)]
    with patch.object(groups, "steps_in_groups", lambda *_: False):
        assert (unreduced(found, off, 1e-4) or ("",))[0] == kind  # type: ignore[arg-type]
