"""Schedule-free AdamW steps as the paper's algorithm says, and its average is lent and taken back bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.averaging import ScheduleFreeAdamW, optimizers_of
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.training.config import Config

LR, BETAS, EPS, DECAY, WARMUP = 0.03, (0.9, 0.95), 1e-6, 0.1, 3
SHAPES = (5, 3), (7,), ()
STEPS = 6


def gradients(step: int) -> list[np.ndarray]:
    generator = np.random.default_rng(step)
    return [generator.normal(size=shape) for shape in SHAPES]


def is_absent(step: int, place: int) -> bool:
    return (step, place) == (1, 1)


def by_hand(steps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Algorithm 1 of arXiv 2405.15682 with its three points written out: y and x behind the steps."""
    found = []
    for place, shape in enumerate(SHAPES):
        x = z = y = np.ones(shape)
        v, taken, total = np.zeros(shape), 0, 0.0
        for step in range(steps):
            if is_absent(step, place):
                continue
            taken += 1
            g = gradients(step)[place]
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            rate = LR * min(1, (step + 1) / WARMUP) * np.sqrt(1 - BETAS[1] ** taken)
            z = z - rate * g / (np.sqrt(v) + EPS) - rate * DECAY * y
            total += rate**2
            x = (1 - rate**2 / total) * x + rate**2 / total * z
            y = (1 - BETAS[0]) * z + BETAS[0] * x
        found.append((y, x))
    return [y for y, _ in found], [x for _, x in found]


def stepped(*, foreach: bool = True, steps: int = STEPS) -> tuple[ScheduleFreeAdamW, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    optimizer = ScheduleFreeAdamW(parameters, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=foreach)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARMUP)
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients(step), strict=True)):
            parameter.grad = None if is_absent(step, place) else torch.tensor(gradient)
        optimizer.step()
    return optimizer, parameters


@pytest.mark.first("foreach")
@pytest.mark.parametrize("foreach", [False, True], ids=("each", "foreach"))
def test_both_points_are_those_of_the_paper(foreach):
    optimizer, parameters = stepped(foreach=foreach)
    ys, xs = by_hand(STEPS)
    before = [p.detach().clone() for p in parameters]
    for p, y in zip(parameters, ys, strict=True):
        torch.testing.assert_close(p.detach(), torch.tensor(y), rtol=1e-13, atol=1e-15)
    with optimizer.averaged(), optimizer.averaged():
        for p, x in zip(parameters, xs, strict=True):
            torch.testing.assert_close(p.detach(), torch.tensor(x), rtol=1e-12, atol=1e-14)
    assert all(map(torch.equal, before, parameters)) and abs(xs[0] - ys[0]).max() > 1e-3
    assert all("y" not in state for state in optimizer.state.values())


def test_no_step_is_taken_from_the_average():
    optimizer, _ = stepped(steps=1)
    optimizer.eval()
    with pytest.raises(ConfigError, match=r"hold the average .* Call train\(\) first"):
        optimizer.step()
    optimizer.train()
    optimizer.step()


def test_an_exception_leaves_the_point_of_training():
    optimizer, parameters = stepped()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError
    assert all(map(torch.equal, before, parameters))


def test_the_last_optimizer_that_was_made_has_the_average():
    first, parameters = stepped(steps=1)
    assert optimizers_of(parameters) == [first]
    second = ScheduleFreeAdamW(parameters)
    assert optimizers_of(parameters) == [second]
    del second
    assert optimizers_of(parameters) == []


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"weight_decay": -0.1}, {"eps": -1.0}, {"betas": (0.0, 0.9)}, {"betas": (0.9, 1.0)}],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"ScheduleFreeAdamW: .*{next(iter(wrong))}"):
        ScheduleFreeAdamW([nn.Parameter(torch.ones(1))], **wrong)


CHOSEN = {"optimizer": {"kind": "schedule_free_adamw"}}


def test_a_falling_rate_and_a_beta_of_zero_are_refused_by_name():
    with pytest.raises(ConfigError, match="schedule.kind = cosine and .*schedule_free.* Set schedule.kind = constant"):
        Config.from_dict(CHOSEN)
    Config.from_dict({**CHOSEN, "schedule": {"kind": "constant", "warmup_steps": 7}})
    with pytest.raises(ConfigError, match=r"optimizer.beta1 = 0.0 and .*schedule_free.* Set optimizer.beta1 = 0.9"):
        Config.from_dict({"schedule": {"kind": "constant"}, "optimizer": {"kind": "schedule_free_adamw", "beta1": 0.0}})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"precision": {"master": "bfloat16"}}, "precision.master = bfloat16 an average .*master = float32"),
        ({"cpu_offload": "optimizer"}, "cpu_offload = optimizer and .*schedule_free.*evaluation needs the state"),
    ],
    ids=str,
)
def test_where_no_average_can_be_taken_it_is_refused(asked, words):
    with pytest.raises(UnsupportedError, match=words):
        plan(SIZES["debug"], Layout(dp_shard=2), techniques={"optimizer": "schedule_free_adamw", **asked})
