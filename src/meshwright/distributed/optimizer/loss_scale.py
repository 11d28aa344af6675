"""Scale the loss dynamically (arXiv 1710.03740, section 3.2): float16 has no small gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALLEST = 2.0**-14
LARGEST = 2.0**24
INTERVAL = 2000


@dataclass
class LossScale:
    """The factor on the loss of a step, by which whole gradients are divided.

    It is halved after a step whose gradients are not finite, and doubled after ``interval`` steps in a row whose are.
    Whether they are follows from a sum over all ranks, so it is the same on all. It is a power of two, so scaling
    rounds nothing.

    Attributes:
        value: now.
        interval: see above.
        good_steps: in a row, since it was last changed.
    """

    value: float
    interval: int = INTERVAL
    good_steps: int = 0

    def follow(self, *, is_finite: bool) -> None:
        """A step's gradients were finite, or not."""
        if not is_finite:
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """What ``state`` gave; of a checkpoint that was written without a scale nothing is taken."""
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
