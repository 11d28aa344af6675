"""Report the results of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .part import Batch


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


class OpenedStep(NamedTuple):
    """This rank's microbatches of a step, and counts over all ranks.

    Attributes:
        tokens: tokens that have a loss.
        weight: sum of the weights of these tokens' losses.
        routed: tokens that are no padding.
    """

    pieces: list[Batch]
    tokens: int
    weight: float
    routed: int
