"""Order: every epoch a permutation, epochs and seeds apart, near-uniform, the same for ever, and no dearer far away."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.data.mixture import Order

seeds = st.integers(-(2**70), 2**70)


@settings(max_examples=150)
@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**9), shuffle=st.booleans())
def test_every_epoch_is_a_permutation(n, seed, epoch, shuffle):
    taken = Order(n, seed, shuffle).take(epoch * n + np.arange(n))
    assert taken.dtype == np.int64 and np.array_equal(np.sort(taken), np.arange(n))
    if not shuffle:
        assert np.array_equal(taken, np.arange(n))


@settings(max_examples=50)
@given(n=st.integers(1, 10**12), seed=seeds, indexes=st.lists(st.integers(0, 2**62), max_size=20))
def test_one_index_alone_gives_what_it_gives_among_others(n, seed, indexes):
    order = Order(n, seed)
    assert order.take(np.array(indexes, dtype=np.int64)).tolist() == [order[index] for index in indexes]
    assert all(0 <= order[index] < n for index in indexes)


@pytest.mark.all
@settings(max_examples=50)
@given(n=st.integers(50, 2000), seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(n, seed, epoch):
    def one_epoch(number, its_seed):
        return Order(n, its_seed).take(number * n + np.arange(n))

    here = one_epoch(epoch, seed)
    assert not np.array_equal(here, np.arange(n))
    for other in (one_epoch(epoch + 1, seed), one_epoch(epoch, seed + 1)):
        # two independent permutations agree in about one place; more than 12 happen less than once in 10^9
        assert (here == other).sum() <= 12


@pytest.mark.first
@pytest.mark.parametrize("n", [2, 3, 5, 16, 17, 40])
def test_every_sample_comes_about_equally_often_at_every_place(n):
    epochs = 4000
    taken = Order(n, seed=5).take(np.arange(n * epochs)).reshape(epochs, n)
    counts = np.array([np.bincount(taken[:, place], minlength=n) for place in range(n)])
    deviations = (counts - epochs / n) / np.sqrt(epochs / n)
    assert np.abs(deviations).max() < 5
    follows = np.mean(taken[:, 1:] - taken[:, :-1] == 1)  # neighbours in the corpus are not neighbours in the order
    assert abs(follows - 1 / n) < 5 / np.sqrt(epochs * (n - 1) * n)


def test_the_order_never_changes_from_one_release_to_the_next():
    # Whoever changes these numbers changes the data order of every run that is resumed.
    assert Order(1000, seed=42).take(np.array([0, 1, 2, 999, 1000, 10**9])).tolist() == [812, 731, 376, 266, 132, 296]
    assert Order(93_735, seed=0).take(np.array([0, 1, 2, 93_735, 10**12])).tolist() == [
        22172,
        37414,
        47428,
        51679,
        56169,
    ]


def test_seeking_far_costs_what_seeking_near_costs():
    order = Order(70_000_001, seed=1)
    order[0]
    begin = time.perf_counter()
    order[10**9]
    order[2**62]
    assert time.perf_counter() - begin < 0.1  # two seeks; about 0.3 ms on an idle machine


def test_refusals():
    with pytest.raises(ConfigError, match="an order over 0 samples: there must be at least 1"):
        Order(0, seed=0)
    with pytest.raises(IndexError, match="index -1: the order begins at 0"):
        Order(5, seed=0)[-1]
