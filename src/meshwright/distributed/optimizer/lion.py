"""Step parameters by the sign of a moving mean of their gradients: Lion (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

from .foreach_private import (
    foreach_add_,
    foreach_between,
    foreach_between_,
    foreach_multiply_,
    foreach_sign_,
)


class Lion(torch.optim.Optimizer):
    """Lion, algorithm 2 of the paper, element by element, so that parameters may be cut in any way.

    With gradient g and mean m, which is zero at first, a step is: w decays by ``lr * weight_decay`` of itself;
    w = w - lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g. Each trained parameter has one
    state, ``exp_avg``, in its dtype. The paper advises a rate 3 to 10 times smaller than AdamW's, and a weight decay as
    many times larger.

    A step is as large where a gradient is rounding alone as anywhere: of parameters without a gradient in exact
    arithmetic (biases of attention's keys), layouts differ by the size of a step.

    Args:
        params: tensors or DTensors, or groups of them.
        lr: rate; every element moves by so much.
        betas: weight of the mean in the step's direction, and decay of the mean.
        weight_decay: decoupled weight decay.
        foreach: whether torch steps all parameters of a group in one call of each operator.

    Raises:
        ConfigError: a rate or a weight decay below zero, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool = False,
    ):
        if lr < 0 or weight_decay < 0:
            raise ConfigError(f"Lion: lr = {lr} and weight_decay = {weight_decay} are 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"Lion: betas = {betas} are in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            gradients, means = [p.grad for p in params], [self.state[p]["exp_avg"] for p in params]
            if group["foreach"] and params:
                _step_all(params, gradients, means, group)
            else:
                for one in zip(params, gradients, means, strict=True):
                    _step_one(*one, group)
        return loss


def _step_one(param: Tensor, gradient: Tensor, mean: Tensor, group: dict[str, Any]) -> None:
    rate, (ahead, behind) = float(group["lr"]), group["betas"]
    param.mul_(1 - rate * group["weight_decay"])
    param.add_(mean.lerp(gradient, 1 - ahead).sign_(), alpha=-rate)
    mean.lerp_(gradient, 1 - behind)


def _step_all(params: list[Tensor], gradients: list[Tensor], means: list[Tensor], group: dict[str, Any]) -> None:
    rate, (ahead, behind) = float(group["lr"]), group["betas"]
    foreach_multiply_(params, 1 - rate * group["weight_decay"])
    directions = foreach_between(means, gradients, 1 - ahead)
    foreach_sign_(directions)
    foreach_add_(params, directions, -rate)
    foreach_between_(means, gradients, 1 - behind)
