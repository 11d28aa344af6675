"""Compute a microbatch's loss by the plan: from logits, from this rank's part of them, or in the head itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError
from meshwright.core.losses import cross_entropy_sum
from meshwright.core.record import recall, remember
from meshwright.distributed.loss.declared import DeclaredLosses, DeclaredObjective
from meshwright.distributed.loss.preference import CountedPairs, LogitsOfRank, PreferenceObjective
from meshwright.distributed.tensor.ends import answer_behind, loss_computing_head
from meshwright.distributed.tensor.layers import LossRequest, LossSite, runtime_of
from meshwright.distributed.tensor.loss import vocabulary_parallel_cross_entropy_sum
from meshwright.planning.plan import Plan

from .batch import labels_of, weights_of
from .part import Batch


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Enable the planned head to compute the loss; a head that is cut can do so already."""
    assert plan.loss is not None
    runtime = runtime_of(model)
    if runtime is None or (plan.tensor is not None and not plan.tensor.head):
        site = runtime or LossSite()
        loss_computing_head(model.get_submodule(plan.loss.head), site)
        answer_behind(model, site)
        remember(model, site)
    return model


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> the SUM of the loss over real tokens, 0-dim."""


class Objective:
    """A function for the summed loss of a microbatch.

    Args:
        model: the model as it was laid out (without a wrapper).
        loss_fn: the user's loss; None: the cross entropy, which alone can be computed from parts of the logits.
        starts_backward: called with a loss that does not derive from the model's output, to start a backward from it.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, loss_fn: LossFunction | None, starts_backward: Callable[[Tensor], None]
    ):
        self.plan, self.loss_fn, self._starts_backward = plan, loss_fn or cross_entropy_sum, starts_backward
        self._logits = LogitsOfRank(model, plan, in_parts=loss_fn is None)
        self._site = runtime_of(model) or recall(model, LossSite)  # None: a head that computes logits only
        self._fused = loss_fn is None and plan.loss is not None and self._site is not None

    def targets(self, piece: Batch, device: torch.device) -> tuple[Any, ...]:
        """Return labels and weights on the device of the computation."""
        weights = weights_of(piece)
        return to_device(labels_of(piece), device), None if weights is None else to_device(weights, device)

    def __call__(self, forward: Callable[[], Any], labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the loss, with (rows, seq) labels and weights of tokens' losses (none with a user's loss)."""
        if self._fused and self.plan.loss is not None and self._site is not None:
            request = LossRequest(labels, self.plan.loss.chunks, weights)
            self._site.request = request
            try:
                forward()
            finally:
                self._site.request = None
            assert request.result is not None
            self._starts_backward(request.result)
            return request.result
        logits = self._logits(forward)
        if self.loss_fn is cross_entropy_sum and logits.shape[:-1] != labels.shape:
            raise ConfigError(
                f"batch['labels'] has shape {tuple(labels.shape)}, and the model's logits {tuple(logits.shape)}: the"
                f" cross entropy needs one label for each vector of logits. Declare another loss:"
                f" loss_fn=meshwright.Loss(...)"
            )
        if self._logits.shard is not None:
            return vocabulary_parallel_cross_entropy_sum(logits, labels, self._logits.shard, weights=weights)
        return self.loss_fn(logits, labels) if weights is None else cross_entropy_sum(logits, labels, weights)


def objective_of(
    model: nn.Module,
    plan: Plan,
    loss: LossFunction | CountedPairs | DeclaredLosses | None,
    starts_backward: Callable[[Tensor], None],
) -> Objective | DeclaredObjective | PreferenceObjective:
    """Return the objective of a model; see ``Objective``."""
    if isinstance(loss, DeclaredLosses):
        return DeclaredObjective(loss, starts_backward)
    if isinstance(loss, CountedPairs):
        return PreferenceObjective(model, plan, loss)
    return Objective(model, plan, loss, starts_backward)
