"""Define the parts of a model that one process runs: one per pipeline stage; without a pipeline, the model."""

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
"""Map a batch to the arguments of the model's forward."""


@dataclass
class ModelPart:
    """A part of a model, as one process runs it.

    Attributes:
        module: the module to call: the model with this stage's parameters alone, or a wrapper of it.
        plan: this part's share of the model's plan.
        facts: facts about the part before the plan was applied.
        stage: number of the stage.
    """

    module: nn.Module
    plan: Plan
    facts: ModelFacts
    stage: int = 0

    @property
    def model(self) -> nn.Module:
        """The module without a wrapper."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module


class Runner(Protocol):
    """A way in which the parts of a process compute together."""

    def forward_backward(self, pieces: Sequence[Batch], weight: float, scale: float = 1.0) -> Tensor:
        """Return this process's share of the sum of all losses, divided by ``weight``: 0-dim float64.

        Gradients accumulate in ``.grad``, ``scale`` times as large, and are whole over all axes at the end.
        """
        ...

    def evaluate(self, pieces: Sequence[Batch]) -> Tensor:
        """Return this process's share of the sum of all losses, without gradients: 0-dim float64."""
        ...

    def logits(self, batch: Batch) -> Tensor:
        """Return (rows, seq, vocabulary), without gradients, on every rank that has these rows."""
        ...

    def row_log_probs(self, batch: Batch) -> Tensor:
        """Return (rows,) sums of the labels' log-probabilities, without gradients, on every rank with these rows."""
        ...

    def action_times(self) -> list[tuple[Action, float, float]]:
        """List a pipeline rank's actions in the last step, with begin and end in seconds since the epoch."""
        ...

    def copy_shared(self) -> None:
        """Copy each shared parameter's values from the first part to the others that hold it."""
        ...
