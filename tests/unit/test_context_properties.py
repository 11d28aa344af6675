"""Properties of cut rows, whatever lengths, documents and masks: no token is lost, and every key is found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.distributed.context import kernels, methods, rows
from meshwright.distributed.context.methods import Halo, Members, shares_of_heads
from meshwright.distributed.context.rows import FILLER, CutRows, cut_batch, cut_rows, select
from meshwright.distributed.exchange import Board, Thread
from meshwright.introspection.mixing import masks as reaches
from meshwright.introspection.mixing.masks import (
    KeyRanges,
    RowMask,
    causal,
    everything,
    in_chunks,
    search,
    shorter_than,
)

pytestmark = pytest.mark.all

ROWS = 3
FEW = settings(max_examples=40, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
"""Rows are short, so that examples need not be shrunk: the faults below fail often."""


@st.composite
def batches(draw: st.DrawFn, ranks: int = 0) -> tuple[dict[str, Tensor], int]:
    """Whole rows with documents of any lengths and numbers, and a number of ranks."""
    ranks = ranks or draw(st.integers(1, 6))
    length = draw(st.integers(ranks, 40))
    documents = []
    for _ in range(ROWS):
        starts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        numbers = draw(st.permutations(range(length)))
        documents.append(torch.tensor(numbers)[torch.tensor(starts).long().cumsum(0).clamp(max=length - 1)])
    ids = torch.stack(documents)
    place = torch.arange(length).expand(ROWS, -1)
    begins = torch.cat((torch.ones(ROWS, 1, dtype=torch.bool), ids.diff(dim=1) != 0), 1)
    positions = place - torch.where(begins, place, 0).cummax(1).values
    return {
        "tokens": torch.arange(ROWS * length).view(ROWS, length),
        "document_ids": ids,
        "positions": positions,
    }, ranks


@st.composite
def masks(draw: st.DrawFn, batch: dict[str, Tensor]) -> RowMask:
    function = draw(st.sampled_from([causal, everything]))
    window, chunk = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    function = shorter_than(function, window) if window else function
    function = in_chunks(function, chunk) if chunk else function
    if draw(st.booleans()):
        return RowMask(function, batch["positions"], batch["document_ids"])
    return RowMask(function, segments=batch["document_ids"] if draw(st.booleans()) else None)


def reach_of(mask: RowMask, length: int) -> KeyRanges:
    found = mask.reach(length, lambda function, length: search(function, length, ROWS))
    assert found is not None
    return KeyRanges(found.lower.expand(ROWS, -1), found.upper.expand(ROWS, -1))


def dense_of(reach: KeyRanges, keys: int) -> Tensor:
    key = torch.arange(keys)
    return (key >= reach.lower[..., None]) & (key < reach.upper[..., None])


def cuts(batch: dict[str, Tensor], ranks: int, **options: Any) -> list[CutRows]:
    return [cut_rows(batch, ranks, rank, **options) for rank in range(ranks)]


OPTIONS = st.sampled_from(
    [
        {},
        {"cut": "contiguous"},
        {"apart": "ids"},
        {"apart": "positions", "by_positions": True},
        {"apart": "ids", "cut": "contiguous"},
    ]
)


# --- rows


def no_token_is_lost(given_batch: tuple[dict[str, Tensor], int], options: dict[str, Any]) -> None:
    batch, ranks = given_batch
    length = batch["tokens"].shape[1]
    made = cuts(batch, ranks, **options)
    counts = made[0].counts
    assert sum(counts) == length and max(counts) - min(counts) <= 1 and all(mine.counts == counts for mine in made)
    for mine in made:
        assert torch.equal(mine.places, made[0].places), "all ranks decide alike"
        assert bool((mine.own.diff(dim=1) > 0).all()), "a rank's tokens are in the row's order"
    everywhere = torch.cat([mine.own for mine in made], dim=1).sort(dim=1).values
    assert torch.equal(everywhere, torch.arange(length).expand_as(everywhere))


@pytest.mark.fast
@FEW
@given(batches(), OPTIONS)
def test_every_token_is_on_one_rank_in_its_order(given_batch, options):
    no_token_is_lost(given_batch, options)


@FEW
@given(batches(), OPTIONS)
def test_a_packed_batch_can_be_put_together_again(given_batch, options):
    batch, ranks = given_batch
    parts = [(cut_batch(batch, mine), mine) for mine in cuts(batch, ranks, **options)]
    for key, whole in batch.items():
        filled = [torch.nn.functional.pad(part[key], (0, mine.most - part[key].shape[1])) for part, mine in parts]
        assert torch.equal(select(torch.cat(filled, dim=1), parts[0][1].slots, 1), whole), key
    assert bool((parts[0][1].places == FILLER).sum(-1).le(1).all())


# --- reaches


@FEW
@given(st.data(), batches())
def test_a_reach_is_the_mask_wherever_it_is_taken(data, given_batch):
    batch, ranks = given_batch
    length = batch["tokens"].shape[1]
    mask = data.draw(masks(batch))
    reach, every = reach_of(mask, length), torch.arange(length)[None]
    expected = mask.dense(every, length, ROWS)[:, 0].expand(ROWS, -1, -1)
    assert torch.equal(dense_of(reach, length), expected)
    mine = data.draw(st.sampled_from(cuts(batch, ranks, apart="ids"))).own.expand(ROWS, -1)
    keys = data.draw(st.sampled_from(cuts(batch, ranks))).own.expand(ROWS, -1)
    found = dense_of(reach.take(mine).among(keys), keys.shape[1])
    queries = expected.gather(1, mine[..., None].expand(-1, -1, length))
    assert torch.equal(found, queries.gather(2, keys[:, None].expand(-1, mine.shape[1], -1)))


def painted(boxes: list[kernels.Box], reach: KeyRanges, keys: int, *, masked: bool) -> Tensor:
    """How often each query attends to each key."""
    times = torch.zeros(*reach.lower.shape, keys, dtype=torch.int64)
    seen = dense_of(reach, keys)
    for box in boxes:
        if masked:
            part = seen[box.rows, box.queries, box.keys]
            assert bool(part.all()) or not box.is_whole
            times[box.rows, box.queries, box.keys] += part
        else:
            size = box.queries.stop - box.queries.start, box.keys.stop - box.keys.start
            ones = torch.ones(size, dtype=torch.int64)
            times[box.rows, box.queries, box.keys] += ones.tril() if box.is_causal else ones
    return times


@FEW
@given(st.data(), batches(), st.integers(1, 7), st.integers(1, 7))
def test_blocks_and_segments_have_every_pair_once(data, given_batch, queries, keys):
    batch, ranks = given_batch
    mask = data.draw(masks(batch))
    mine, theirs = (data.draw(st.sampled_from(cuts(batch, ranks, apart="ids"))).own for _ in range(2))
    reach = reach_of(mask, batch["tokens"].shape[1]).take(mine.expand(ROWS, -1)).among(theirs.expand(ROWS, -1))
    count = theirs.shape[1]
    with patch.object(kernels, "QUERIES", queries), patch.object(kernels, "KEYS", keys):
        tiles = [tile for run in kernels.blocks(reach) for tile in run]
    with patch.object(kernels, "SHORTEST", 0):
        runs = kernels.segments(reach)
    assert runs is not None
    for found, masked in ((tiles, True), (runs, False)):
        assert torch.equal(painted(found, reach, count, masked=masked), dense_of(reach, count).long())


# --- what travels


def every_key_is_fetched(data: st.DataObject, given_batch: tuple[dict[str, Tensor], int]) -> None:
    batch, ranks = given_batch
    length = batch["tokens"].shape[1]
    reach = reach_of(data.draw(masks(batch)), length)
    made = cuts(batch, ranks, **data.draw(OPTIONS))
    halos = [Halo.of(Thread(Board(ranks), rank), mine, reach, ROWS) for rank, mine in enumerate(made)]
    seen = dense_of(reach, length)
    for rank, (mine, found) in enumerate(zip(made, halos, strict=True)):
        assert found.sends == [other.receives[rank] for other in halos] and found.sends[rank] == 0
        assert found.most == max(sum(other.sends) for other in halos)
        own = mine.own.expand(ROWS, -1)
        needed = seen.gather(1, own[..., None].expand(-1, -1, length)).any(1)
        held = torch.zeros(ROWS, length + 1, dtype=torch.int64).scatter_add(1, found.places, found.places * 0 + 1)
        wanted = needed.scatter(1, own, False)
        assert torch.equal(held[:, :length], wanted.long()), "what its queries reach of others' tokens, once each"
        assert bool((found.places.diff(dim=1) >= 0).all())


@FEW
@given(st.data(), batches())
def test_a_halo_is_what_queries_reach_and_no_more(data, given_batch):
    every_key_is_fetched(data, given_batch)


@FEW
@given(batches(6), OPTIONS, st.sampled_from([1, 2, 3, 6]))
def test_members_know_their_tokens_among_all(given_batch, options, count):
    batch, ranks = given_batch
    made = cuts(batch, ranks, **options)[0]
    for first in range(0, ranks, count):
        members = Members.of(Thread(Board(ranks), first), made, first, count)
        together = torch.cat([made.of_ranks[rank] for rank in range(first, first + count)], dim=1)
        assert torch.equal(members.places, together.sort(dim=1).values)
        for rank, numbers in zip(range(first, first + count), members.numbers, strict=True):
            assert torch.equal(members.places.gather(1, numbers.index), made.of_ranks[rank])


@pytest.mark.fast
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_heads_are_shared_out_with_their_key_heads(ranks, own, groups):
    for heads_, key_heads in ((ranks * own * groups, ranks * groups), (ranks * own, 1), (ranks * own, ranks)):
        mine, keys = shares_of_heads(heads_, key_heads, ranks)
        assert [head for share in mine for head in share] == list(range(heads_))
        for share, of_share in zip(mine, keys, strict=True):
            assert sorted({head * key_heads // heads_ for head in share}) == list(of_share)


# --- faults that the properties find


def a_token_twice() -> AbstractContextManager[Any]:
    correct = rows.cut_row
    return patch.object(rows, "cut_row", lambda *given: (correct(*given)[0],) * given[2])


def ranks_in_another_order() -> AbstractContextManager[Any]:
    correct = rows.cut_row
    return patch.object(rows, "cut_row", lambda *given: tuple(runs[::-1] for runs in correct(*given)))


def a_key_too_few() -> AbstractContextManager[Any]:
    correct = methods._needed
    return patch.object(
        methods, "_needed", lambda reach, length: correct(KeyRanges(reach.lower + 1, reach.upper), length)
    )


def a_key_too_many() -> AbstractContextManager[Any]:
    correct = methods._needed
    return patch.object(
        methods,
        "_needed",
        lambda reach, length: correct(KeyRanges((reach.lower - 1).clamp(min=0), reach.upper), length),
    )


def keys_counted_from_behind() -> AbstractContextManager[Any]:
    correct = reaches.KeyRanges.among
    return patch.object(reaches.KeyRanges, "among", lambda self, places: correct(self, places.flip(1)))


def last_tile_lost() -> AbstractContextManager[Any]:
    correct = kernels.blocks
    return patch.object(kernels, "blocks", lambda reach: [run[:-1] for run in correct(reach)])


def members_by_rank() -> AbstractContextManager[Any]:
    def of(group: Any, made: CutRows, first: int, count: int) -> Members:
        theirs = [made.of_ranks[rank] for rank in range(first, first + count)]
        starts = [sum(part.shape[1] for part in theirs[:number]) for number in range(count)]
        wrong = (start + torch.arange(p.shape[1]).expand_as(p) for start, p in zip(starts, theirs, strict=True))
        return Members(group, first, count, made, tuple(map(rows.Numbers.of, wrong)), torch.cat(theirs, dim=1))

    return patch.object(methods.Members, "of", of)


FAULTS = {
    a_token_twice: test_every_token_is_on_one_rank_in_its_order,
    ranks_in_another_order: test_every_token_is_on_one_rank_in_its_order,
    a_key_too_few: test_a_halo_is_what_queries_reach_and_no_more,
    a_key_too_many: test_a_halo_is_what_queries_reach_and_no_more,
    keys_counted_from_behind: test_a_reach_is_the_mask_wherever_it_is_taken,
    last_tile_lost: test_blocks_and_segments_have_every_pair_once,
    members_by_rank: test_members_know_their_tokens_among_all,
}


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_property_finds(fault):
    with fault(), pytest.raises((AssertionError, RuntimeError)):
        for _ in range(10):  # draws are few
            FAULTS[fault]()
