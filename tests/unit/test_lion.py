"""Lion steps as the paper's algorithm says, one parameter at a time and all at once, and refuses wrong values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.distributed.optimizer.muon import Lion

LR, BETAS, DECAY = 0.03, (0.9, 0.99), 0.1
SHAPES = (5, 3), (7,), ()


def gradients(step: int) -> list[np.ndarray]:
    generator = np.random.default_rng(step)
    return [generator.normal(size=shape) for shape in SHAPES]


def by_hand(steps: int) -> list[np.ndarray]:
    """Algorithm 2 of arXiv 2302.06675, in numpy; a gradient is absent in the second step of the second parameter."""
    weights, means = [np.ones(shape) for shape in SHAPES], [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        for place, gradient in enumerate(gradients(step)):
            if (step, place) == (1, 1):
                continue
            update = np.sign(BETAS[0] * means[place] + (1 - BETAS[0]) * gradient)
            weights[place] = weights[place] - LR * (update + DECAY * weights[place])
            means[place] = BETAS[1] * means[place] + (1 - BETAS[1]) * gradient
    return weights


@pytest.mark.parametrize("foreach", [False, True], ids=("each", "foreach"))
def test_steps_are_those_of_the_paper(foreach):
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    optimizer = Lion(parameters, lr=LR, betas=BETAS, weight_decay=DECAY, foreach=foreach)
    for step in range(4):
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients(step), strict=True)):
            parameter.grad = None if (step, place) == (1, 1) else torch.tensor(gradient)
        optimizer.step()
    for parameter, expected in zip(parameters, by_hand(4), strict=True):
        torch.testing.assert_close(parameter.detach(), torch.tensor(expected), rtol=1e-13, atol=1e-15)


def test_an_element_without_a_gradient_only_decays():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([0.0, 3.0])
    Lion([parameter], lr=0.5, weight_decay=0.2).step()
    assert parameter.tolist() == pytest.approx([0.9, 0.4])


def test_a_closure_is_called_with_gradients_on():
    parameter = nn.Parameter(torch.ones(2))

    def loss() -> torch.Tensor:
        parameter.grad = None
        value = parameter.square().sum()
        value.backward()
        return value

    assert Lion([parameter], lr=0.1).step(loss).item() == 2 and parameter.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}], ids=str)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"Lion: .*{next(iter(wrong))}"):
        Lion([nn.Parameter(torch.ones(1))], **wrong)
