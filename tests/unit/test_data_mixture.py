"""Mixtures: each source gets its share of every stretch, each of its samples once per epoch, and any index costs the
same.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.data import Interleave, Loader, Samples, Stage, Stream

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5, 30.0]), min_size=1, max_size=6).filter(any)


def stream(n_samples: int, begin: int) -> Stream:
    return Stream("training", np.arange(begin, begin + 2 * n_samples, dtype=np.uint32), np.array([0, 2 * n_samples]))


@settings(max_examples=100)
@given(weights=WEIGHTS, start=st.integers(0, 10**12), n=st.integers(1, 3000))
def test_every_stretch_has_the_shares_asked_for(weights, start, n):
    dealt = Interleave([Stage(0, tuple(weights))])
    source, _ = dealt.take(start + np.arange(n))
    for k, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs((source == k).sum() - n * share) <= len(weights) + 1e-3 * n
        assert weight or not (source == k).any()


@settings(max_examples=100)
@given(data=st.data(), n_parts=st.integers(1, 5), start=st.integers(0, 2000), n=st.integers(1, 2000))
def test_places_of_a_source_go_on_one_by_one_through_every_stage(data, n_parts, start, n):
    weights = st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0]), min_size=n_parts, max_size=n_parts).filter(any)
    firsts = sorted(data.draw(st.sets(st.integers(1, 3000), max_size=3)))
    dealt = Interleave([Stage(first, tuple(data.draw(weights))) for first in (0, *firsts)])
    source, place = dealt.take(start + np.arange(n))
    before, after = dealt.given(start), dealt.given(start + n)
    for k in range(n_parts):
        assert place[source == k].tolist() == list(range(before[k], after[k]))
    assert before.sum() == start and after.sum() == start + n


def test_one_source_is_its_own_order():
    split = stream(50, 0)
    samples = Samples.of([split], 2, seed=4)
    indexes = np.arange(120)
    assert samples.rows(indexes)["tokens"][:, 0].tolist() == (samples.orders[0].take(indexes) * 2).tolist()


def test_each_sample_of_each_source_comes_once_per_epoch_of_it():
    samples = Samples.of([stream(30, 0), stream(10, 1000)], 2, 1, ["a", "b"], Interleave([Stage(0, (3.0, 1.0))]))
    rows = samples.rows(np.arange(80))["tokens"][:, 0]
    for epoch in (rows[:40], rows[40:]):
        assert sorted(epoch.tolist()) == [*range(0, 60, 2), *range(1000, 1020, 2)]
    assert samples.epochs(80) == {"a": 2.0, "b": 2.0}


def test_another_source_does_not_change_the_order_of_the_others():
    alone = Samples.of([stream(30, 0), stream(30, 100)], 2, 1, ["a", "b"])
    more = Samples.of([stream(30, 0), stream(30, 100), stream(30, 200)], 2, 1, ["a", "b", "c"])
    assert alone.orders == more.orders[:2] and alone.orders[0] != alone.orders[1]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_deal_the_mixture_among_them(world):
    samples = Samples.of(
        [stream(30, 0), stream(10, 1000)], 2, 1, ["a", "b"], Interleave([Stage(0, (2.0, 1.0)), Stage(24, (0.0, 1.0))])
    )
    loaders = [Loader(samples, 8, rank, world) for rank in range(world)]
    for loader in loaders:
        loader.seek(16)
    seen = [row for _ in range(2) for loader in loaders for row in next(loader)["tokens"][:, 0].tolist()]
    assert seen == samples.rows(16 + np.arange(16))["tokens"][:, 0].tolist()
    assert all(first >= 1000 for first in seen[8:]), "from sample 24 on only the second source is left"


def test_a_far_index_is_as_quick_as_a_near_one():
    parts = [stream(1000 + k, 10_000 * k) for k in range(5)]
    dealt = Interleave([Stage(0, (5, 1, 2, 0.3, 0.01)), Stage(10**8, (1, 1, 0, 1, 1))])
    samples = Samples.of(parts, 2, 0, list("abcde"), dealt)
    samples.rows(np.arange(8))
    begin = time.perf_counter()
    samples.rows(10**9 + np.arange(8))
    assert time.perf_counter() - begin < 0.5, "a walk over 10**9 samples would take minutes"


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "weights from sample 0 on"),
        ([Stage(4, (1.0,))], "weights from sample 0 on"),
        ([Stage(0, (1.0, 1.0)), Stage(4, (1.0,))], r"weights \[1.0\]: there must be one for each of the 2 parts"),
        ([Stage(0, (0.0, 0.0))], "not all 0"),
        ([Stage(0, (1.0, -1.0))], "0 or more"),
        ([Stage(0, (1.0, float("nan")))], "0 or more"),
        (
            [Stage(0, (1.0,)), Stage(9, (1.0,)), Stage(9, (1.0,))],
            r"begin at samples \[0, 9, 9\]: each must begin after the one before",
        ),
    ],
)
def test_refusals_teach(stages, words):
    with pytest.raises(ConfigError, match=words):
        Interleave(stages)
