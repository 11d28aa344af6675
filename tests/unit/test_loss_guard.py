"""A guard calls a loss a spike by robust deviations of the last losses, and not before it knows enough of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.training.health.loss_guard import LossGuard

LOSSES = np.random.default_rng(3).normal(2.0, 0.1, 40).tolist()


def bound(losses: list[float], deviations: float) -> float:
    middle = float(np.median(losses))
    return middle + deviations * max(1.4826 * float(np.median(np.abs(np.array(losses) - middle))), 1e-3 * middle)


def test_the_bound_is_so_many_deviations_above_the_median_of_the_last_losses():
    guard = LossGuard(5.0, 20, LOSSES)
    limit = bound(LOSSES[-20:], 5.0)
    assert guard.spike(limit - 1e-9) == "" and guard.spike(-100.0) == ""
    assert "5.0 deviations above the median" in guard.spike(limit + 1e-9)
    guard.keep(9.0)
    assert guard.losses == [*LOSSES[-19:], 9.0] and guard.spike(9.0), "an outlier that was taken hides no other"


def test_nothing_is_judged_before_the_window_is_full():
    guard = LossGuard(1.0, 4)
    for loss in (2.0, 2.0, 2.0):
        assert guard.spike(1e6) == ""
        guard.keep(loss)
    guard.keep(2.0)
    assert guard.spike(1e6)


def test_equal_losses_have_a_deviation_and_what_is_not_finite_is_left_to_others():
    guard = LossGuard(3.0, 4, [2.0] * 4)
    assert guard.spike(2.0059) == "" and "3.0 deviations" in guard.spike(2.0061)
    assert guard.spike(math.nan) == guard.spike(math.inf) == ""
    assert "any number of deviations" in LossGuard(3.0, 4, [0.0] * 4).spike(1e-9)


@pytest.mark.parametrize("at", [0, 7, 30])
def test_a_guard_that_is_continued_judges_as_one_that_is_not(at):
    whole, begun = LossGuard(2.0, 8), LossGuard(2.0, 8)
    verdicts: list[tuple[str, str]] = []
    for step, loss in enumerate(LOSSES):
        if step == at:
            begun = LossGuard(2.0, 8, begun.losses)
        verdicts.append((whole.spike(loss), begun.spike(loss)))
        for guard, verdict in zip((whole, begun), verdicts[-1], strict=True):
            if not verdict:
                guard.keep(loss)
    assert all(one == other for one, other in verdicts) and any(one for one, _ in verdicts)
