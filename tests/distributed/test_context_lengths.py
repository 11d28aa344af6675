"""Models that use the number of a row's tokens, with rows cut over ranks: equal to one process, or refused by line."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.counting import (
    CARRIED,
    BegunAtTwo,
    MinGPT,
    OfAllTokens,
    OfHalfTheLength,
    OfMiddleLength,
    OfWeight,
    Range,
    RotaryTable,
    ScaledByLength,
    Scan,
    ShorterThanAttribute,
    ShortRows,
    counting,
)
from support.cut_rows import EXACT, FP64, WAYS, batch, errors

from meshwright import Layout, parallelize, plan
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.context import modules
from meshwright.distributed.context.proof import prove
from meshwright.introspection.facts import model_facts

pytestmark = pytest.mark.all

NO_STAGES = (MinGPT, OfWeight)
"""Models whose forward reads a parameter outside of the modules that it calls."""


@pytest.mark.parametrize(
    ("way", "kind"),
    [(way, kind) for way in WAYS for kind in CARRIED if not ("pp" in WAYS[way][1] and kind in NO_STAGES)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_positions_are_those_of_a_ranks_tokens(way, kind, spmd):
    world, sizes, techniques = WAYS[way]
    for found in spmd(world, errors, partial(counting, kind), sizes, techniques, 19):
        assert {n: e for n, e in found.items() if not e <= EXACT} == {}


def refused(kind, length):
    try:
        errors(partial(counting, kind), {"cp": 2, "dp_shard": 1}, {}, length)
    except UnsupportedError as error:
        return str(error)
    return ""


DECIDING = [ShortRows, ShorterThanAttribute, OfMiddleLength, OfHalfTheLength, OfAllTokens]


@pytest.mark.parametrize("kind", DECIDING, ids=lambda kind: kind.__name__)
def test_a_decision_by_the_length_is_refused_where_a_part_of_a_row_is_another_case(kind, spmd):
    for length, words in {12: "", 19: r"counting.py:\d+, .*the 10 tokens of a rank instead of 19", 40: ""}.items():
        for found in spmd(2, refused, kind, length):
            assert bool(found) == bool(words) and re.search(words, found), found


def test_a_factor_of_the_length_is_refused_with_its_line(spmd):
    for found in spmd(2, refused, ScaledByLength, 19):
        assert re.search(r"computes with the number of a row's tokens at counting.py:\d+, 'return .*\*\* -0.5'", found)


def too_long():
    model = parallelize(counting(RotaryTable), Layout(dp_shard=1, cp=2), techniques=FP64)
    try:
        model.forward_backward(batch(70))
    except UnsupportedError as error:
        return str(error)


def test_a_row_that_is_longer_than_a_table_is_refused(spmd):
    for found in spmd(2, too_long):
        assert "a table of 64 positions is read for rows of 70 tokens at counting.py" in found


def test_without_the_places_the_rehearsal_refuses(monkeypatch):
    monkeypatch.setattr(modules._OwnPlaces, "_places", lambda self, device: torch.arange(self.own))
    facts = model_facts(counting(CARRIED[0]))
    with pytest.raises(
        UnsupportedError, match="were rehearsed on a small copy, plain, and the gradient of .* is wrong"
    ):
        prove(facts, plan(facts, Layout(dp_shard=1, cp=2)).context)


def brought(kind, differs):
    """Errors where each rank brings its own tokens with their places, every other one; or the words of a refusal."""
    given, reference = batch(18), counting(kind)
    model = parallelize(counting(kind), Layout(dp_shard=1, cp=2), techniques=FP64)
    rank = dist.get_rank()
    places = torch.arange(rank, 18, 2).repeat(4, 1)
    if differs:
        places[1] = torch.arange(1 - rank, 18, 2)
    own = {key: rows.gather(1, places) for key, rows in given.items()} | {"places": places}
    loss = F.cross_entropy(reference(given["tokens"]).flatten(0, 1), given["labels"].flatten())
    try:
        return float((model.forward_backward(own).loss - loss).abs())
    except (ConfigError, UnsupportedError) as error:
        return str(error)


@pytest.mark.parametrize("kind", [Range, OfWeight, Scan, BegunAtTwo], ids=lambda kind: kind.__name__)
def test_tokens_that_ranks_bring_are_counted_by_their_places(kind, spmd):
    assert all(error <= EXACT for error in spmd(2, brought, kind, False))


def test_places_that_differ_from_row_to_row_are_refused_where_a_model_counts_all_rows_alike(spmd):
    for found in spmd(2, brought, Range, True):
        assert re.search(r"batch\['places'\] differs from row to row.*counting.py:\d+, .*arange", found)
    assert all(error <= EXACT for error in spmd(2, brought, Scan, True))


@pytest.mark.first
def test_a_decision_by_the_length_is_refused_of_tokens_that_ranks_bring(spmd):
    for found in spmd(2, brought, ShortRows, False):
        assert re.search("decides by the length of a row .*the 9 tokens of a rank instead of 18", found)
