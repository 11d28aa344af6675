"""Shares of a dim: all ranks together hold every slice, each as often as it is said to be copied, in the order of the
whole.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.parts import FusedPart, is_plain, ranges, take


@st.composite
def shared_out(draw):
    """Parts that so many ranks can share out."""
    ranks = draw(st.integers(1, 8))
    several = st.integers(1, 3).map(lambda n: n * ranks)
    divisors = st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        groups = draw(st.one_of(several, divisors))
        parts.append(FusedPart(groups * draw(st.integers(1, 4)), groups))
    return ranks, tuple(parts)


@given(shared_out())
def test_ranks_together_hold_every_slice_as_often_as_it_is_copied(case):
    ranks, parts = case
    assert all(part.fits(ranks) for part in parts)
    start = 0
    for number, part in enumerate(parts):
        held: Counter[int] = Counter()
        for rank in range(ranks):
            low, high = ranges(parts, rank, ranks)[number]
            assert start <= low < high <= start + part.size
            assert (low - start) % (part.size // part.groups) == 0 == (high - start) % (part.size // part.groups), (
                "a group is torn"
            )
            held.update(range(low, high))
        assert held == dict.fromkeys(range(start, start + part.size), part.copies(ranks))
        start += part.size


@given(shared_out())
def test_shares_lie_in_the_order_of_ranks_and_those_of_copies_are_neighbours(case):
    ranks, parts = case
    for number, part in enumerate(parts):
        lows = [ranges(parts, rank, ranks)[number][0] for rank in range(ranks)]
        copies = part.copies(ranks)
        assert lows == sorted(lows)
        assert (
            all(len(set(lows[i : i + copies])) == 1 for i in range(0, ranks, copies))
            and len(set(lows)) == ranks // copies
        )


@given(shared_out(), st.integers(0, 2))
def test_what_is_taken_is_the_runs_side_by_side_on_any_dim(case, dim):
    ranks, parts = case
    shape = [2, 3, 2]
    shape[dim] = sum(part.size for part in parts)
    whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    for rank in range(ranks):
        places = [i for low, high in ranges(parts, rank, ranks) for i in range(low, high)]
        assert torch.equal(take(whole, dim, parts, rank, ranks), whole.index_select(dim, torch.tensor(places)))


@given(st.integers(1, 8), st.integers(1, 30))
def test_rows_that_do_not_divide_are_taken_as_torchs_chunks(ranks, rows):
    if ranks >= 2 * rows:
        return  # such a part is held in copies
    whole = torch.arange(rows)
    found = [take(whole, 0, (FusedPart(rows, rows),), rank, ranks) for rank in range(ranks)]
    chunks = whole.chunk(ranks)
    assert all(torch.equal(mine, chunk) for mine, chunk in zip(found, chunks, strict=False))
    assert not any(len(mine) for mine in found[len(chunks) :]), "torch gives the last ranks nothing"


def test_only_one_run_without_copies_is_plain():
    assert is_plain((FusedPart(6, 6),), 2) and is_plain((FusedPart(6, 6),), 4), "torch's chunks need no equal shares"
    assert not is_plain((FusedPart(6, 2),), 4), "copies"
    assert not is_plain((FusedPart(6, 6), FusedPart(6, 6)), 2), "two runs"


def test_a_run_is_a_view_and_several_are_not():
    whole = torch.arange(8)
    assert take(whole, 0, (FusedPart(8, 4),), 1, 2).data_ptr() == whole[4:].data_ptr()
    assert take(whole, 0, (FusedPart(4, 2), FusedPart(4, 2)), 1, 2).tolist() == [2, 3, 6, 7]
    assert [take(whole, 0, (FusedPart(8, 2),), rank, 4)[0].item() for rank in range(4)] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("groups", "ranks", "fits"), [(4, 2, True), (2, 4, True), (3, 2, False), (2, 3, False), (6, 4, False), (1, 5, True)]
)
def test_a_share_is_never_torn(groups, ranks, fits):
    assert FusedPart(12, groups).fits(ranks) == fits
