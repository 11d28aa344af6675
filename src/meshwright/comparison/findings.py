"""Describe findings: the differences compared, those beyond rounding, and where the first one shows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

STAGES = (
    "batch",
    "initial weight",
    "initial buffer",
    "forward",
    "buffer",
    "recomputed",
    "products",
    "loss",
    "backward",
    "gradient",
    "norm",
    "optimizer",
    "parameter",
    "random",
    "alike",
    "repeated",
)
"""Stages in the order in which a step computes them and a fault first shows; the last three are random numbers."""

WORDS = {
    "batch": "the batch of step {step}",
    "initial weight": "the initial weight {name}",
    "initial buffer": "the initial value of the buffer {name}",
    "forward": "the output of {name} (forward){later}",
    "buffer": "the buffer {name} after the forward of step {step}",
    "recomputed": "what the backward recomputes of {name}{later}",
    "products": "the products in float8 that give {name}",
    "loss": "the loss of step {step}",
    "backward": "the gradient of {name}'s output (backward){later}",
    "gradient": "the gradient of the parameter {name}, after the backward{later}",
    "norm": "the gradient norm of step {step}",
    "parameter": "the parameter {name} after step {step}",
    "optimizer": "the optimizer's {name} after step {step}",
    "random": "the random numbers in {name} (dropout)",
    "alike": "the random numbers in {name} (dropout)",
    "repeated": "the random numbers in {name} (dropout)",
}
"""The place of a difference, by stage; ``later`` names the step where it is not the first."""

WHY = {
    "products": "fewer than in one process, so some are in high precision",
    "random": "equal, and ranks that hold different rows must draw different ones",
    "alike": "different, and ranks that hold the same rows must draw the same",
    "repeated": "those of the step before, and each step must draw new ones",
}

WORST = 5
"""Number of gradients that a table names."""


@dataclass(frozen=True)
class Difference:
    """The error of one compared quantity and its bound."""

    stage: str
    """One of ``STAGES``."""
    name: str
    """A module or a parameter; empty for a quantity of the whole model."""
    error: float
    bound: float
    ratio: float | None = None
    """Factor of the reference in the found tensor (its projection on the reference); None where it is meaningless."""
    step: int = 1
    ranks: tuple[int, ...] = ()
    """The ranks with the difference; empty where all have it."""

    @property
    def is_beyond(self) -> bool:
        return not self.error <= self.bound

    @property
    def place(self) -> str:
        """The place of the difference in plain English."""
        later = f" of step {self.step}" if self.step > 1 else ""
        words = WORDS[self.stage].format(name=self.name or "the whole model", step=self.step, later=later)
        several = "s" if len(self.ranks) > 1 else ""
        return words + (f", on rank{several} {' and '.join(map(str, self.ranks))}" if self.ranks else "")


@dataclass(frozen=True)
class Comparison:
    """All quantities that were compared in one dtype."""

    dtype: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    """Notes on quantities that were not compared, or compared otherwise than usual."""

    @property
    def is_equal(self) -> bool:
        return not any(d.is_beyond for d in self.differences)

    @property
    def first(self) -> Difference | None:
        """The first difference beyond its bound, in the order in which steps compute."""
        return min(
            (d for d in self.differences if d.is_beyond), key=lambda d: (d.step, STAGES.index(d.stage)), default=None
        )

    @property
    def factor(self) -> float | None:
        """The one factor by which all gradients are off (a sum that should be a mean, or the reverse), else None."""
        found = [d for d in self.differences if d.stage == "gradient" and d.ratio is not None and d.step == 1]
        if not found:
            return None
        ratios = sorted(d.ratio for d in found if d.ratio is not None)
        blur = min(max(1e-6, *(d.bound for d in found)), 0.05)  # rounding error of each ratio
        middle = ratios[len(ratios) // 2]
        if abs(middle - 1) < max(1e-3, 2 * blur) or ratios[-1] - ratios[0] > 2 * blur * abs(middle):
            return None
        return middle

    def of(self, stage: str) -> list[Difference]:
        """Sort a stage's differences: those beyond their bound first, then the largest in units of the bound."""
        return sorted((d for d in self.differences if d.stage == stage), key=_rank)

    def lines(self) -> list[str]:
        """Format for people: the first difference, then the worst of every stage."""
        lines = []
        if self.first is not None:
            lines.append(f"  {self.dtype}: {_words(self.first)}")
        if self.factor is not None:
            lines.append(f"  {self.dtype}: every gradient is {self.factor:.6g} × that of one process")
        for stage in STAGES:
            found = self.of(stage)
            if found and (found[0].bound or found[0].is_beyond):
                worst = found[0]
                verdict = "differs" if worst.is_beyond else "equal"
                name = f"step {worst.step}" if stage in ("batch", "loss", "norm") else worst.name or "the model"
                lines.append(
                    f"  {self.dtype:<8} {stage:<10} {verdict:<8} worst {worst.error:.1e} of {worst.bound:.1e}  {name}"
                )
        beyond = [d for d in self.of("gradient") if d.is_beyond]
        lines += [f"           {d.name}: {d.error:.1e}" for d in beyond[1:WORST] if d.step == beyond[0].step]
        return [*lines, *(f"  {self.dtype}: {note}" for note in self.notes)]

    def plain(self) -> dict[str, Any]:
        """Convert to JSON values; JSON has no infinity, so null stands for the error of a missing tensor."""
        return {
            "dtype": self.dtype,
            "equal": self.is_equal,
            "first": self.first and _plain(self.first),
            "notes": list(self.notes),
            "differences": [_plain(d) for d in self.differences],
        }


def _words(first: Difference) -> str:
    if first.stage in WHY:
        return f"wrong are {first.place}: {WHY[first.stage]}"
    if first.error == math.inf:
        return f"first differs at {first.place}: one of the two is missing, has another shape, or is not finite"
    return f"first differs at {first.place}: error {first.error:.1e}, at most {first.bound:.1e} is rounding"


def _rank(difference: Difference) -> tuple[bool, float]:
    is_finite = math.isfinite(difference.error) and 0 < difference.bound < math.inf
    return (
        not difference.is_beyond,
        -difference.error / difference.bound if is_finite else -math.inf if difference.error else 0.0,
    )


def _plain(difference: Difference) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(difference).items()
    }
