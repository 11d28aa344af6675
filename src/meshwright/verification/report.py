"""What a verification found, for people and for machines."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.planning.layout import Layout

from .compare import first_beyond
from .equality import Difference

WORST = 5
"""Gradients that are named in a table."""


@dataclass(frozen=True)
class Comparison:
    """One layout against one process, in one dtype."""

    dtype: str
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        return not any(d.is_beyond for d in self.differences)

    @property
    def first(self) -> Difference | None:
        """Where a difference first shows."""
        return first_beyond(self.differences)

    @property
    def factor(self) -> float | None:
        """The one factor by which all gradients are off, None where there is none: a sum that should be a mean, or the other way round."""
        ratios = [d.ratio for d in self.differences if d.stage == "gradient" and d.ratio is not None]
        if not ratios or abs(ratios[0] - 1) < 1e-3 or max(ratios) - min(ratios) > 1e-6 * abs(ratios[0]):
            return None
        return ratios[0]

    def of(self, stage: str) -> list[Difference]:
        """The differences of a stage, those beyond their bound first, then the worst in units of its bound."""
        return sorted((d for d in self.differences if d.stage == stage), key=_rank)


def _rank(difference: Difference) -> tuple[bool, float]:
    is_finite = math.isfinite(difference.error) and 0 < difference.bound < math.inf
    return not difference.is_beyond, -difference.error / difference.bound if is_finite else -math.inf if difference.error else 0.0


def _plain(difference: Difference) -> dict[str, Any]:
    """For JSON, which knows no infinity: null stands for an error that is none, of something that is missing."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in asdict(difference).items()}


@dataclass(frozen=True)
class Report:
    """The verdict on a layout."""

    layout: Layout
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def is_equal(self) -> bool:
        return all(comparison.is_equal for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        lines = [f"{self.layout}: {'equal within rounding' if self.is_equal else 'DIFFERS'} ({self.seconds:.1f} s)"]
        for comparison in self.comparisons:
            lines += _table(comparison)
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, as JSON."""
        rows = [
            {"dtype": c.dtype, "equal": c.is_equal, "first": c.first and _plain(c.first), "differences": [_plain(d) for d in c.differences]}
            for c in self.comparisons
        ]
        return json.dumps({"layout": asdict(self.layout), "equal": self.is_equal, "seconds": self.seconds, "comparisons": rows}, indent=1)


def _table(comparison: Comparison) -> list[str]:
    lines = []
    if comparison.first is not None:
        d = comparison.first
        lines.append(f"  {comparison.dtype}: first differs at {place(d)}: error {d.error:.1e}, at most {d.bound:.1e} is rounding")
    if comparison.factor is not None:
        lines.append(f"  {comparison.dtype}: every gradient is {comparison.factor:.6g} × that of one process")
    for stage in ("loss", "norm", "forward", "backward", "gradient", "parameter"):
        found = comparison.of(stage)
        if found:
            worst = found[0]
            verdict = "differs" if worst.is_beyond else "equal"
            sizes = f"worst {worst.error:.1e} of {worst.bound:.1e}"
            lines.append(f"  {comparison.dtype:<8} {stage:<10} {verdict:<8} {sizes}  {worst.name or 'the model'}")
    beyond = [d for d in comparison.of("gradient") if d.is_beyond]
    lines += [f"           {d.name}: {d.error:.1e}" for d in beyond[1:WORST]]
    return lines


def place(difference: Difference) -> str:
    """Where a difference is, in words."""
    name = difference.name or "the whole model"
    words = {
        "initial weight": f"the initial weight {name}",
        "forward": f"the output of {name} (forward)",
        "loss": f"the loss of {name}",
        "backward": f"the gradient of {name}'s output (backward)",
        "gradient": f"the gradient of the parameter {name}, after the backward",
        "norm": f"the gradient norm of {name}",
        "parameter": f"the parameter {name} after the last step",
    }
    return words[difference.stage]
