"""Rows of documents cut over ranks: equal tokens, equal work, few keys that travel."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import ConfigError
from meshwright.distributed.context.rows import cut_rows
from meshwright.planning.context import documents
from meshwright.planning.context.documents import cut_documents, work_of
from meshwright.planning.context.plan import Runs, head_tail

LONG = 2**17


def by_document(sizes: Sequence[int], runs: Runs) -> list[list[tuple[int, int]]]:
    """List a rank's runs within each document."""
    ends = pairwise(accumulate(sizes, initial=0))
    return [
        [(max(a, start) - start, min(b, stop) - start) for a, b in runs if a < stop and start < b]
        for start, stop in ends
    ]


def work_of_ranks(sizes: Sequence[int], cut: Sequence[Runs]) -> list[int]:
    """Count the pairs of a query and a key that each rank computes."""
    return [sum(work_of(*run) for own in by_document(sizes, runs) for run in own) for runs in cut]


def fetched_tokens(sizes: Sequence[int], cut: Sequence[Runs]) -> int:
    """Count the keys that all ranks together fetch: those before a query of theirs, in its document, that they lack."""
    held = [own for runs in cut for own in by_document(sizes, runs) if own]
    return sum(max(stop for _, stop in own) - sum(stop - start for start, stop in own) for own in held)


def lognormal(seed: int, deviation: float, length: int = LONG) -> list[int]:
    """Lengths of documents with a median of 512 to 1024 tokens that fill a row."""
    draw, sizes = random.Random(seed), []
    median = math.log(draw.choice((512, 768, 1024)))
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(left, max(1, int(draw.lognormvariate(median, deviation)))))
    return sizes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_every_token_is_on_one_rank_and_ranks_have_as_many(sizes, ranks):
    length = sum(sizes)
    if length < ranks:
        with pytest.raises(ConfigError, match=f"layout.cp = {ranks} cuts each row over {ranks} ranks"):
            cut_documents(sizes, ranks)
        return
    cut = cut_documents(sizes, ranks)
    assert sorted(place for runs in cut for run in runs for place in range(*run)) == list(range(length))
    counts = [sum(stop - start for start, stop in runs) for runs in cut]
    assert counts == [sum(stop - start for start, stop in runs) for runs in head_tail(length, ranks)]
    assert all(list(runs) == sorted(runs) for runs in cut)
    assert sum(work_of_ranks(sizes, cut)) == sum(work_of(0, size) for size in sizes)


@pytest.mark.first
@pytest.mark.parametrize("deviation", [1.5, 2.0, 2.5])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_work_is_balanced(ranks, deviation):
    for seed in range(5):
        sizes = lognormal(seed, deviation)
        work = work_of_ranks(sizes, cut := cut_documents(sizes, ranks))
        assert max(work) <= 1.03 * sum(work) / ranks
        assert fetched_tokens(sizes, cut) < 0.6 * (ranks - 1) * LONG, "of those that a gathering moves"


def test_head_and_tail_alone_would_not_balance_documents():
    sizes = lognormal(0, 2.0)
    work = work_of_ranks(sizes, head_tail(LONG, 8))
    assert max(work) > 1.5 * sum(work) / 8


def test_one_document_is_cut_at_head_and_tail():
    work = work_of_ranks([4096], cut_documents([4096], 4))
    assert max(work) <= 1.03 * sum(work) / 4


def test_short_documents_stay_whole():
    assert fetched_tokens([8] * 16, cut_documents([8] * 16, 4)) == 0


def least_by_force(sizes: list[int], ranks: int, work: int, tokens: int) -> int:
    """The fewest keys fetched by any placing of tokens with no more work and tokens on a rank."""
    length = sum(sizes)
    codes = np.arange(ranks**length)
    owner = np.stack([codes // ranks**place % ranks for place in range(length)], axis=1)
    document = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    fetched, allowed = np.zeros(len(codes)), np.ones(len(codes), dtype=bool)
    for rank in range(ranks):
        own = owner == rank
        allowed &= (own.sum(1) <= tokens) & ((own * (place + 1)).sum(1) <= work)
        for number in range(len(sizes)):
            mine = own[:, document == number]
            last = np.where(mine.any(1), mine.shape[1] - mine[:, ::-1].argmax(1), 0)
            fetched += last - mine.sum(1)
    return int(fetched[allowed].min())


SHORT = [(2, length) for length in range(9, 17)] * 5 + [(3, 9)] * 10


def ours_and_least() -> list[tuple[int, int]]:
    """Keys fetched in rows of 9 to 16 tokens, and the fewest of any placing with no more work and tokens on a rank."""
    draw, found = random.Random(7), []
    for ranks, length in SHORT:
        sizes: list[int] = []
        while (left := length - sum(sizes)) > 0:
            sizes.append(min(left, draw.choice((1, 2, 3, 5, 8, 12))))
        cut = cut_documents(sizes, ranks)
        tokens = max(sum(stop - start for start, stop in runs) for runs in cut)
        least = least_by_force(sizes, ranks, max(work_of_ranks(sizes, cut)), tokens)
        found.append((fetched_tokens(sizes, cut), least))
    return found


def test_keys_that_travel_are_near_the_fewest():
    found = ours_and_least()
    assert all(ours <= max(1.2 * least, least + 1) for ours, least in found), "of each row; or one key more"
    assert sum(ours > 1.2 * least for ours, least in found) <= 1
    assert sum(ours for ours, _ in found) <= 1.03 * sum(least for _, least in found)


def single_exchanges_alone(patch):
    patch.setattr(documents._Search, "best_of_two", lambda search, ranks, work: None)


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", [single_exchanges_alone], ids=lambda fault: fault.__name__)
def test_a_poorer_search_is_further_from_the_fewest(monkeypatch, fault):
    fault(monkeypatch)
    assert sum(ours > 1.2 * least for ours, least in ours_and_least()) > 5


@pytest.mark.parametrize("apart", ["ids", "positions"])
def test_rows_are_cut_each_by_its_own_documents(apart):
    sizes = [[5, 7, 20], [32]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in sizes])
    starts = torch.stack([torch.searchsorted(row, row) for row in ids])
    batch = {"tokens": ids, "document_ids": ids, "positions": torch.arange(32) - starts}
    rows = cut_rows(batch, 2, 1, apart=apart, by_positions=True)
    assert rows.has_documents and rows.places.shape == (2, 2, 16)
    for number, row in enumerate(sizes):
        expected = cut_documents(row, 2)[1] if len(row) > 1 else head_tail(32, 2)[1]
        assert rows.own[number].tolist() == [place for run in expected for place in range(*run)]
