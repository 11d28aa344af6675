"""Define the part of a model that one process runs: one for each of its pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.introspection.facts import ModelFacts
from meshwright.planning.pipeline.schedules.action import Action
from meshwright.planning.plan import Plan

Batch = Mapping[str, Tensor]
Inputs = Callable[[Batch], dict[str, Any]]
"""A function from a batch to the arguments of the model's forward."""


@dataclass
class ModelPart:
    """Attributes:
    module: what is called: the model with this stage's parameters alone, or a wrapper of it.
    plan: what of the model's plan is about it.
    facts: what it was before the plan was applied.
    stage: its number.
    """

    module: nn.Module
    plan: Plan
    facts: ModelFacts
    stage: int = 0

    @property
    def model(self) -> nn.Module:
        """Without a wrapper."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module


class Runner(Protocol):
    """A runner of the parts of a process."""

    def forward_backward(self, pieces: Sequence[Batch], weight: float, scale: float = 1.0) -> Tensor:
        """Return what this process finds of the sum of all losses, divided by ``weight``: 0-dim float64.

        Gradients add up in ``.grad``, ``scale`` times as large, and whole over all axes when it ends.
        """
        ...

    def evaluate(self, pieces: Sequence[Batch]) -> Tensor:
        """Return what this process finds of the sum of all losses, without gradients: 0-dim float64."""
        ...

    def logits(self, batch: Batch) -> Tensor:
        """Return (rows, seq, vocabulary), without gradients, on every rank that has these rows."""
        ...

    def action_times(self) -> list[tuple[Action, float, float]]:
        """Return what a pipeline's rank did in the last step, and when it began and ended, in seconds since the
        epoch.
        """
        ...

    def copy_shared(self) -> None:
        """Parameters that parts in several places share get the values of the first."""
        ...
