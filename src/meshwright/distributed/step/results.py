"""Report the results of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepLoss:
    """The (weighted) mean loss of all ranks' real ``tokens``, in nats, 0-dim float64, equal on all ranks."""

    loss: Tensor
    tokens: int

    def __float__(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class StepResult:
    """The global gradient 2-norm before clipping; ``skipped``: weights unchanged (non-finite loss or gradient)."""

    grad_norm: float
    skipped: bool
