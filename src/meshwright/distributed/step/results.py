"""Report the results of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .part import Batch


@dataclass(frozen=True)
class StepLoss:
    """The (weighted) mean loss of all ranks' real ``tokens``, in nats, 0-dim float64, equal on all ranks.

    ``tokens`` is the number that it is a mean over: tokens, other labels or rows. ``parts``: each loss's share of it,
    where several were declared. ``weight``: what the sum of losses was divided by: the number of real tokens, the sum
    of their weights, or the number of pairs; 1 with declared losses, each of which has its own count. ``figures``: of
    pairs of answers, means over them by name (``loss.preference.FIGURES``).
    """

    loss: Tensor
    tokens: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0
    figures: Mapping[str, Tensor] = field(default_factory=dict)

    def __float__(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class StepResult:
    """The global gradient 2-norm before clipping; ``skipped``: weights unchanged.

    A step is skipped for a loss or gradient that is not finite, or by a guard's verdict.
    """

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
