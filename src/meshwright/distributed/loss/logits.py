"""Get a model's logits for a loss: whole, or this rank's part of the vocabulary where the head is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.distributed.tensor.layers import runtime_of
from meshwright.distributed.tensor.loss import VocabularyShard
from meshwright.introspection.signature import logits_of
from meshwright.planning.plan import Plan


class LogitsOfRank:
    """A function for the logits that a loss is computed from.

    Args:
        model: the model as it was laid out (without a wrapper).
        in_parts: the loss can be computed from parts of the logits.

    Attributes:
        shard: this rank's part of the vocabulary that the last logits are of; None: logits are whole.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, in_parts: bool):
        self._runtime, self.shard = runtime_of(model), None
        tensor = plan.tensor
        if not in_parts or tensor is None or self._runtime is None:
            return
        if tensor.head and not tensor.tail.obstacle_if_cut:
            rows = model.get_submodule(tensor.head).get_parameter("weight").shape[0]
            self.shard = VocabularyShard.of(rows, self._runtime.group)

    def __call__(self, forward: Callable[[], Any]) -> Tensor:
        """Return (rows, seq, vocabulary), or (rows, seq, shard.size) of this rank's ids."""
        if self.shard is None or self._runtime is None:
            return logits_of(forward())
        self._runtime.logits = "own"
        try:
            logits = logits_of(forward())
        finally:
            self._runtime.logits = "whole"
        self.shard = self._runtime.shard
        return logits
