"""Report what an optimizer step computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepLoss:
    """``loss``: (weighted) mean over all real tokens of the step on all ranks, nats, 0-dim float64, equal on all;
    ``tokens``: how many.
    """

    loss: Tensor
    tokens: int

    def __float__(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class StepResult:
    """``grad_norm``: global 2-norm before clipping; ``skipped``: the weights were left alone (non-finite loss or
    gradient).
    """

    grad_norm: float
    skipped: bool
