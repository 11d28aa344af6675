"""Run a step of a model that is one part, microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import tree_map_only
from meshwright.distributed.data import accumulation, fully_sharded, replicated
from meshwright.distributed.experts import SharedRouterLoss
from meshwright.distributed.loss.declared import DeclaredLosses
from meshwright.distributed.loss.preference import CountedPairs, log_probs_of
from meshwright.distributed.step.objective import LossFunction, objective_of
from meshwright.distributed.step.part import Batch, Inputs, ModelPart
from meshwright.distributed.tensor.layers import runtime_of
from meshwright.distributed.tensor.parallel import summing, sums_of
from meshwright.introspection.signature import logits_of
from meshwright.planning.pipeline.schedule import Action


class WholeModel:
    """A ``Runner`` for a model without a pipeline."""

    def __init__(
        self,
        part: ModelPart,
        loss_fn: LossFunction | CountedPairs | DeclaredLosses | None,
        inputs: Inputs,
        device: torch.device,
        router_loss: SharedRouterLoss | None = None,
    ):
        self.part, self.device, self._inputs, self._router_loss = part, device, inputs, router_loss
        starts_backward = lambda loss: fully_sharded.begin_backward_at(part.model, loss)  # noqa: E731
        self._objective = objective_of(part.model, part.plan, loss_fn, starts_backward)
        self._sums = sums_of(part.model, part.plan)

    def forward_backward(self, pieces: Sequence[Batch], weight: float, scale: float = 1.0) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        runtime = runtime_of(self.part.model)
        # gradients that the plan marks as partial sums over the tensor axis are summed at the end, in one message
        with nullcontext() if runtime is None else summing(self._sums, runtime.group):
            for number, piece in enumerate(pieces):
                with accumulation.context(self.part.module, self.part.plan, number == len(pieces) - 1):
                    if self._router_loss is not None:
                        self._router_loss.logits.begin()
                    loss = self._loss_sum(piece) / weight
                    total += loss.detach()
                    if self._router_loss is not None:
                        loss = loss + self._router_loss(piece)
                    (loss if scale == 1.0 else loss * scale).backward()
        replicated.refuse_unused(self.part.module, self.part.plan.data)
        return total

    def evaluate(self, pieces: Sequence[Batch]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for piece in pieces:
            total += self._loss_sum(piece)
        return total

    def logits(self, batch: Batch) -> Tensor:
        return logits_of(self.part.model(**self._inputs(batch)))

    def row_log_probs(self, batch: Batch) -> Tensor:
        forward = lambda: self.part.model(**self._inputs(batch))  # noqa: E731
        return log_probs_of(self._objective, self.part.model, forward, batch, self.device)

    def action_times(self) -> list[tuple[Action, float, float]]:
        return []

    def copy_shared(self) -> None:
        """Do nothing: nothing is shared with other processes."""

    def _loss_sum(self, piece: Batch) -> Tensor:
        targets = self._objective.targets(piece, self.device)
        try:
            return self._objective(lambda: self.part.module(**self._inputs(piece)), *targets)
        except RuntimeError as error:
            if len(next(iter(piece.values()))):
                raise
            raise UnsupportedError(
                f"this rank has none of the step's rows, and the model's code takes no batch of 0 rows ({error}): bring"
                f" a row for each data rank at least"
            ) from error


def without_backward(output: Any) -> Any:
    """Let a backward from any tensor of an output raise UnsupportedError."""
    return tree_map_only(
        Tensor,
        lambda leaf: _Outside.apply(leaf, torch.zeros((), requires_grad=True)) if leaf.is_floating_point() else leaf,
        output,
    )


class _Outside(torch.autograd.Function):
    """Passes an output on, and refuses a backward from it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise UnsupportedError(
            "model(...) computes without gradients: over ranks, its backward would add up losses that were divided by"
            " each rank's own count. Train by forward_backward(batch), with loss_fn=meshwright.Loss(...)"
        )
