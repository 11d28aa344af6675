"""Scale the loss dynamically (arXiv 1710.03740, section 3.2): float16 has no small gradients, so all are enlarged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALLEST = 2.0**-14
LARGEST = 2.0**24
INTERVAL = 2000


@dataclass
class LossScale:
    """The factor of a step's loss, by which the gradients are divided when they are whole.

    The scale is halved after a step whose gradients are not finite, and doubled after ``interval`` finite steps in a
    row. All ranks agree, since finiteness follows from a sum over them. A power of two as a scale rounds nothing.

    Attributes:
        value: the present scale.
        interval: steps before the scale is doubled.
        good_steps: finite steps in a row since the last change.
    """

    value: float
    interval: int = INTERVAL
    good_steps: int = 0

    def follow(self, *, is_finite: bool) -> None:
        """Adjust the scale after a step whose gradients were finite, or not."""
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
        """Restore ``state``; an empty one, from a checkpoint without a scale, changes nothing."""
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
