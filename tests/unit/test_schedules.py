"""Learning-rate schedules: exact at their ends, monotone between them, continuous, and refused where they cannot be met."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.training.optim.schedules import KINDS, Schedule, learning_rate

relaxed = settings(deadline=None)  # a shared machine's pauses are not failures


@st.composite
def schedules(draw, kinds=KINDS, min_steps=1) -> Schedule:
    kind = draw(st.sampled_from(kinds))
    total = draw(st.integers(min_steps, 400))
    # Half at most: a wsd decay that leaves no step for the peak is refused, see below.
    fraction = draw(st.floats(0.01, 0.5))
    most = total - max(1, round(fraction * total)) if kind == "wsd" else total - 1
    return Schedule(
        peak=draw(st.floats(1e-6, 10.0)),
        total_steps=total,
        kind=kind,
        warmup_steps=draw(st.integers(0, max(most, 0))),
        final_ratio=draw(st.floats(0.0, 1.0)),
        decay_fraction=fraction,
    )


def rates(schedule: Schedule) -> list[float]:
    return [schedule(step) for step in range(schedule.total_steps)]


@relaxed
@given(schedules())
def test_warm_up_is_linear_learns_at_step_zero_and_ends_at_the_peak(schedule):
    warmup = schedule.warmup_steps
    for step in range(warmup):
        assert schedule(step) == pytest.approx(schedule.peak * (step + 1) / warmup, rel=1e-12)
    assert schedule(max(warmup, 1) - 1) == schedule.peak


@relaxed
@given(schedules(kinds=("cosine", "linear", "wsd"), min_steps=2))
def test_the_last_step_and_those_beyond_have_the_final_rate(schedule):
    final = schedule.final_ratio * schedule.peak
    for step in (schedule.total_steps - 1, schedule.total_steps, 10 * schedule.total_steps):
        assert schedule(step) == pytest.approx(final, rel=1e-12, abs=0.0 if final else 1e-300)


@relaxed
@given(schedules())
def test_rates_are_bounded_and_never_rise_after_the_peak(schedule):
    values = rates(schedule)
    after_peak = values[max(schedule.warmup_steps, 1) - 1 :]
    room = 1e-12 * schedule.peak
    assert all(0 < value <= schedule.peak + room for value in values[: schedule.warmup_steps])
    assert all(schedule.final_ratio * schedule.peak - room <= value <= schedule.peak + room for value in after_peak)
    assert all(later <= earlier + room for earlier, later in zip(after_peak, after_peak[1:], strict=False))


@relaxed
@given(schedules(min_steps=2))
def test_no_jump_is_larger_than_the_slope_of_its_part(schedule):
    fall = schedule.peak * (1 - schedule.final_ratio)
    span = schedule.total_steps - max(schedule.warmup_steps, 1)
    steepest = {
        "cosine": fall * math.pi / 2 / span,
        "linear": fall / span,
        "wsd": fall / max(1, round(schedule.decay_fraction * schedule.total_steps)),
        "constant": 0.0,
    }[schedule.kind]
    values = rates(schedule)
    for step, (earlier, later) in enumerate(zip(values, values[1:], strict=False), start=1):
        limit = schedule.peak / schedule.warmup_steps if step < schedule.warmup_steps else steepest
        assert abs(later - earlier) <= limit + 1e-12 * schedule.peak


@relaxed
@given(schedules(kinds=("wsd",), min_steps=2))
def test_wsd_holds_the_peak_until_the_decaying_part(schedule):
    decay = max(1, round(schedule.decay_fraction * schedule.total_steps))
    start = max(schedule.warmup_steps, 1) - 1
    assert {schedule(step) for step in range(start, schedule.total_steps - decay)} == {schedule.peak}
    for position in range(1, decay + 1):
        expected = schedule.peak * (1 - (1 - schedule.final_ratio) * position / decay)
        assert schedule(schedule.total_steps - decay - 1 + position) == pytest.approx(expected, rel=1e-9, abs=1e-12 * schedule.peak)


@relaxed
@given(st.integers(2, 300), st.floats(0.0, 1.0))
def test_cosine_without_warm_up_is_torchs(total, final_ratio):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - 1, eta_min=0.5 * final_ratio)
    for step in (0, 1, total // 2, total - 1):
        theirs.last_epoch = step
        expected = theirs._get_closed_form_lr()[0]
        assert learning_rate(step, peak=0.5, total_steps=total, final_ratio=final_ratio) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_no_warm_up_and_one_step_of_it_are_the_same_and_one_step_has_the_peak(kind):
    given_settings = {"peak": 1.0, "total_steps": 20, "kind": kind}
    assert rates(Schedule(**given_settings, warmup_steps=0)) == rates(Schedule(**given_settings, warmup_steps=1))
    assert [learning_rate(0, peak=1.0, total_steps=1, kind=kind, warmup_steps=w) for w in (0, 1)] == [1.0, 1.0]


def test_constant_stays_at_the_peak_whatever_the_final_ratio():
    assert set(rates(Schedule(peak=2.0, total_steps=9, kind="constant", final_ratio=0.0))) == {2.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "cosin"}, "Did you mean 'cosine'"),
        ({"warmup_steps": 100}, "at most 99"),
        ({"warmup_steps": -1}, "0 steps or more"),
        ({"final_ratio": 1.5}, "between 0 and 1"),
        ({"peak": math.nan}, "finite"),
        ({"total_steps": 0}, "1 step or more"),
        ({"kind": "wsd", "decay_fraction": 0.0}, "above 0"),
        ({"kind": "wsd", "decay_fraction": 0.5, "warmup_steps": 60}, "decay_fraction to at most 0.4"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_with_the_repair(change, words):
    asked = {"peak": 1e-3, "total_steps": 100, **change}
    with pytest.raises(ConfigError, match=words):
        Schedule(**asked)
    with pytest.raises(ConfigError, match=words):
        learning_rate(0, **asked)


def test_a_negative_step_is_refused():
    with pytest.raises(ConfigError, match="counted from 0"):
        learning_rate(-1, peak=1.0, total_steps=10)


def test_apply_scales_groups_and_depends_on_the_step_alone():
    weight, head, table = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [weight]}, {"params": [head], "lr_scale": 0.1}, {"params": [table], "lr": torch.tensor(7.0), "lr_scale": 2.0}]
    optimizer = torch.optim.AdamW(groups, lr=9.0, foreach=False)
    in_place = optimizer.param_groups[2]["lr"]
    schedule = Schedule(peak=1.0, total_steps=10, kind="linear", final_ratio=0.0)
    for step in (7, 0, 9, 4):  # in any order: a resume is a jump
        rate = schedule.apply(optimizer, step)
        assert rate == learning_rate(step, peak=1.0, total_steps=10, kind="linear", final_ratio=0.0)
        lrs = [group["lr"] for group in optimizer.param_groups]
        assert lrs[:2] == [rate, 0.1 * rate]
        assert lrs[2] is in_place and in_place.item() == pytest.approx(2 * rate)


def test_describe_names_what_happens_when():
    assert (
        Schedule(peak=3e-4, total_steps=2000, warmup_steps=100).describe()
        == "cosine: up to 0.0003 over 100 steps, down to 3e-05 at step 2,000"
    )
    assert "held until step 1,800" in Schedule(peak=1.0, total_steps=2000, kind="wsd").describe()
    assert Schedule(peak=1.0, total_steps=5, kind="constant").describe() == "constant: 1 from the first step, held to the end"
