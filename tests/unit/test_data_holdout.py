"""Held-out documents: about the fraction by bytes, never all, and decided by names alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.data.building import cut_point, hold_out

many_sizes = st.lists(st.integers(1, 10_000), min_size=2, max_size=60)


@settings(max_examples=150)
@given(sizes=many_sizes, fraction=st.floats(0.001, 0.999))
def test_several_documents_leave_something_on_either_side_and_no_more_than_asked(sizes, fraction):
    chosen = hold_out([f"{i}.txt" for i in range(len(sizes))], sizes, fraction)
    held = int(np.array(sizes)[chosen].sum())
    assert 0 < chosen.sum() < len(sizes)
    assert held <= fraction * sum(sizes) or (chosen.sum() == 1 and held == min(sizes))
    # all that still fits is in
    assert held + min(np.array(sizes)[~chosen]) > fraction * sum(sizes)


@settings(max_examples=50)
@given(order=st.permutations(range(20)))
def test_the_choice_is_of_names_and_not_of_the_order_in_which_they_come(order):
    names = [f"folder/{i}.py" for i in range(20)]
    chosen = hold_out(names, [100] * 20, 0.2)
    shuffled = hold_out([names[i] for i in order], [100] * 20, 0.2)
    assert chosen.sum() == 4 and np.array_equal(shuffled, chosen[list(order)])


def test_the_choice_never_changes_from_one_release_to_the_next():
    # Whoever changes this lets held-out text into the training of every run that is resumed.
    assert np.flatnonzero(hold_out([f"{i}.txt" for i in range(100)], [1] * 100, 0.05)).tolist() == [14, 35, 46, 53, 91]


def test_a_file_name_that_is_not_utf8_has_a_place_too():
    assert hold_out(["caf\udce9.txt", "b.txt"], [5, 5], 0.5).sum() == 1


@given(n=st.integers(0, 10_000), fraction=st.floats(0.001, 0.999))
def test_one_document_is_cut_near_the_fraction_with_both_sides_kept(n, fraction):
    cut = cut_point(n, fraction)
    if n < 2:
        assert cut == n
    else:
        assert 1 <= cut <= n - 1 and abs((n - cut) - n * fraction) <= 1.5


def test_nothing_is_held_out_of_nothing_or_by_a_fraction_of_nothing():
    assert not hold_out(["a", "b"], [1, 1], 0).any() and not hold_out(["a"], [1], 0.5).any()
    assert cut_point(10, 0) == 10


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"data\.validation_fraction = .*at least 0 .* below 1"):
        hold_out(["a", "b"], [1, 1], fraction)
