"""Learning rates are functions of the step alone, with the shapes that their names promise, or are refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.training.build import build_schedule, refuse_early
from meshwright.training.config import Config
from meshwright.training.optimizer import KINDS, LearningRateSchedule
from meshwright.training.tracing import traced_facts

DECAYING = [kind for kind in KINDS if kind != "constant"]


def rates(kind: str, total: int = 10, warmup: int = 2, **options: float) -> list[float]:
    return [LearningRateSchedule(1.0, total, kind, warmup, **options)(step) for step in range(total)]


def test_shapes_are_those_of_their_formulas():
    assert rates("constant") == pytest.approx([0.5] + [1.0] * 9)
    assert rates("linear", final_ratio=0.2) == pytest.approx([0.5, *(1 - 0.1 * n for n in range(9))])
    cosine = [0.5, *((0.1 + 0.9 * (1 + math.cos(math.pi * n / 8)) / 2) for n in range(9))]
    assert rates("cosine") == pytest.approx(cosine)
    assert rates("wsd", final_ratio=0.0, decay_fraction=0.4) == pytest.approx([0.5] + [1] * 5 + [0.75, 0.5, 0.25, 0])
    assert rates("inverse_sqrt", warmup=4) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, *(math.sqrt(4 / n) for n in range(5, 11))]
    )


@given(kind=st.sampled_from(KINDS), total=st.integers(2, 400), share=st.floats(0, 0.5), final=st.floats(0, 1))
def test_rates_rise_to_the_peak_and_never_rise_again(kind, total, share, final):
    warmup = int(share * total)
    found = rates(kind, total, warmup, final_ratio=final)
    top = max(warmup, 1) - 1
    assert found[top] == 1.0 and max(found) == 1.0
    assert all(before < after for before, after in pairwise(found[: top + 1]))
    assert all(before >= after - 1e-12 for before, after in pairwise(found[top:]))
    if kind in ("cosine", "linear", "wsd") and top < total - 1:
        assert found[-1] == final


@pytest.mark.parametrize("kind", KINDS)
def test_steps_behind_the_end_keep_the_last_rate(kind):
    last, later = (LearningRateSchedule(2.0, 50, kind, 5)(n) for n in (49, 500))
    assert last == later


@pytest.mark.parametrize("kind", DECAYING)
def test_what_is_printed_names_both_ends(kind):
    schedule = LearningRateSchedule(3e-4, 2000, kind, 100)
    assert f"{kind}: up to 0.0003 over 100 steps" in schedule.describe()
    assert f"down to {schedule(1999):g}" in schedule.describe()


@given(kind=st.sampled_from(KINDS), half=st.integers(1, 30), share=st.floats(0, 0.5), each=st.integers(1, 4096))
def test_rates_by_tokens_of_equal_steps_are_those_by_steps(kind, half, share, each):
    total, warmup = 2 * half, max(1, int(share * 2 * half))
    by_steps = LearningRateSchedule(1.0, total, kind, warmup, 0.1, 0.5)
    by_tokens = LearningRateSchedule(1.0, total * each, kind, warmup * each, 0.1, 0.5, by_tokens=True)
    places = [(step, (step + 1) * each) for step in range(total)]
    found = [by_tokens(by_tokens.place(*place)) for place in places]
    assert found == pytest.approx([by_steps(by_steps.place(*place)) for place in places])


def test_a_step_has_the_rate_of_its_last_token():
    schedule = LearningRateSchedule(1.0, 100, "linear", 10, 0.0, by_tokens=True)
    taken = [4, 4, 30, 0, 60, 50]
    found = [schedule(schedule.place(99, sum(taken[: n + 1]))) for n in range(len(taken))]
    assert found == pytest.approx([0.4, 0.8, 62 / 90, 62 / 90, 2 / 90, 0.0])
    assert schedule(schedule.place(5, 0)) == pytest.approx(0.1), "a first step without any token"
    assert "linear: up to 1 over 10 tokens, down to 0 at token 100" in schedule.describe()


def test_groups_have_their_share_of_the_rate():
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr_scale": scale} for scale in (1.0, 0.5)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    assert LearningRateSchedule(0.4, 10, "inverse_sqrt").apply(optimizer, 3) == pytest.approx(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "cosin"}, r"schedule.kind = 'cosin' is none of cosine, .* Did you mean 'cosine'\?"),
        ({"warmup_steps": 10}, r"warmup_steps = 10 in a run of 10 steps"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"final_ratio": 1.5}, "final_ratio = 1.5"),
        ({"kind": "wsd", "decay_fraction": 0.0}, "decay_fraction = 0.0"),
        ({"kind": "wsd", "warmup_steps": 8, "decay_fraction": 0.5}, "together more than steps = 10"),
        ({"peak": math.nan}, "peak = nan"),
        ({"total_steps": 0}, "total_steps = 0"),
        (
            {"by_tokens": True, "warmup_steps": 10},
            r"schedule.warmup_tokens = 10 in a run of 10 tokens.* schedule.tokens",
        ),
        ({"by_tokens": True, "kind": "inverse_sqrt"}, "inverse_sqrt by tokens .* Set schedule.warmup_tokens"),
    ],
    ids=str,
)
def test_settings_that_make_no_schedule_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        LearningRateSchedule(**{"peak": 1.0, "total_steps": 10, **options})


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            {"tokens": 100, "warmup_steps": 3},
            "schedule.tokens = 100 and schedule.warmup_steps = 3.*warmup_tokens instead",
        ),
        ({"warmup_tokens": 5}, "schedule.warmup_tokens = 5, and the rate follows steps. Set schedule.tokens"),
    ],
    ids=str,
)
def test_lengths_in_two_units_are_refused(schedule, words):
    with pytest.raises(ConfigError, match=words):
        Config.from_dict({"schedule": schedule})


def test_a_warm_up_that_outlasts_the_run_is_refused():
    run = {"steps": 10, "batch": {"global_batch": 2}, "data": {"seq_len": 8}}
    schedule = {"tokens": 4000, "warmup_tokens": 160}
    with pytest.raises(ConfigError, match=r"schedule.warmup_tokens = 160, and the run has at most 160 tokens"):
        build_schedule(Config.from_dict({**run, "schedule": schedule}))
    build_schedule(Config.from_dict({**run, "schedule": {**schedule, "warmup_tokens": 159}}))


def test_a_config_says_tokens_and_the_warm_up_follows():
    made = build_schedule(Config.from_dict({"schedule": {"tokens": 4000}}))
    assert (made.total_steps, made.warmup_steps, made.by_tokens) == (4000, 200, True)
    assert not build_schedule(Config()).by_tokens


def test_a_trace_refuses_tokens_and_passes_over_guards():
    by_tokens = Config.from_dict({"check_trace": "x.trace", "schedule": {"tokens": 4000}})
    with pytest.raises(UnsupportedError, match="schedule.tokens = 4000: a trace holds the rates of steps"):
        refuse_early(by_tokens)
    with pytest.raises(UnsupportedError, match="schedule.tokens"):
        traced_facts(by_tokens, {}, "float32", 2)
    guarded = Config.from_dict({"optimizer": {"max_loss_deviation": 5.0, "loss_window": 7}})
    assert traced_facts(guarded, {}, "float32", 2) == traced_facts(Config(), {}, "float32", 2)
