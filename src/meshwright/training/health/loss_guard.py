"""Judge whether a step's loss is far above those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

NORMAL = 1.4826
"""Standard deviation of a normal distribution, in medians of the distance from its median."""
LEAST = 1e-3
"""Least deviation, as a share of the median: equal losses have none of their own."""


class LossGuard:
    """The last losses, and the bound that the next one is held to; equal on all ranks, whose losses are.

    A deviation is 1.4826 times the median distance of the last ``window`` losses from their median: the standard
    deviation of normal ones, but blind to single outliers. Losses of steps that were skipped are not counted, so a
    lasting rise stops the run by its limit of skipped steps. Nothing is judged before ``window`` losses are known.

    Args:
        deviations: number of deviations above the median from which on a loss is a spike.
        window: number of losses that are looked at.
        losses: the last ones, as of a run that is continued.
    """

    def __init__(self, deviations: float, window: int, losses: Sequence[float] = ()):
        self.deviations, self.window = deviations, window
        self.losses = list(losses)[-window:]

    def spike(self, loss: float) -> str:
        """Return a phrase on why a loss is a spike, and "" where it is none or not finite, which others see."""
        if len(self.losses) < self.window or not math.isfinite(loss):
            return ""
        middle = median(self.losses)
        deviation = max(NORMAL * median(abs(other - middle) for other in self.losses), LEAST * abs(middle))
        above = loss - middle
        if above <= self.deviations * deviation:
            return ""
        far = f"{above / deviation:,.1f} deviations" if deviation else "any number of deviations"
        return f"the loss {loss:.4f} lies {far} above the median {middle:.4f} of the last {self.window}"

    def keep(self, loss: float) -> None:
        """Remember the loss of a step that was taken."""
        self.losses = [*self.losses, loss][-self.window :]
