"""Define equality: one measure of error for every tensor, one bound per dtype, a floor set by rounding; and findings.

Error of a tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · norm of all references of its kind). (An
elementwise relative error is meaningless: the true gradient of a key bias is zero.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Named = Mapping[str, Tensor]
Key = TypeVar("Key")

EXACT = 1e-10
"""Bound in float64."""
ROUNDED = 1e-6
"""Least bound in float32 (in bfloat16 too: weights and sums are float32), in float64 for models that cast to float32.
"""
FLOORS = 4.0
"""Multiple of the floor that still counts as rounding: a layout orders its sums differently than the floor's run."""
HALVES = ("bfloat16", "float16", "float8")
"""Compute dtypes for weights in float32; in float8, only some of the products are computed."""
HALF_FLOORS = 2.0
"""``FLOORS`` in ``HALVES``, where the floor is the whole distance of, say, bfloat16 from float32 in one process."""


def relative_errors(found: Named, reference: Named) -> dict[str, float]:
    """Compute each tensor's error, by name; infinite for a tensor missing on one side, misshapen or not finite."""
    whole = math.sqrt(sum(r.double().norm().item() ** 2 for r in reference.values()))
    errors = dict.fromkeys(
        [*(name for name in reference if name not in found), *(name for name in found if name not in reference)],
        math.inf,
    )
    for name in reference:
        if name in found:
            errors[name] = relative_error(found[name].double(), reference[name].double(), whole)
    return errors


def ratio(found: Tensor, reference: Tensor) -> float | None:
    """Compute ⟨found, reference⟩ / ⟨reference, reference⟩; None where it is undefined or not finite."""
    if found.shape != reference.shape or not (whole := reference.double().norm().item() ** 2):
        return None
    value = (found.double() * reference.double()).sum().item() / whole
    return value if math.isfinite(value) else None


def relative_error(found: Tensor, reference: Tensor, whole: float = 0.0) -> float:
    """Compute a tensor's error beside the norm ``whole`` of all of its kind; infinite if misshapen or not finite."""
    if found.shape != reference.shape:
        return math.inf
    least = max(1e-6 * whole, torch.finfo(torch.float64).tiny)
    error = ((found - reference).norm() / max(reference.norm().item(), least)).item()
    return error if math.isfinite(error) else math.inf


def bound_of(dtype: str, floor: float, *, rounds: bool = False) -> float:
    """Return the largest error that still counts as equality.

    Args:
        floor: the error of the same quantity between runs of one process: in float32 the largest among runs that
            order their sums differently, in bfloat16, float16 and float8 the largest of runs against one in float32.
            float64 has none.
        rounds: the model rounds to float32 inside, as its floor in float64 shows.
    """
    if dtype == "float64":
        return ROUNDED if rounds else EXACT
    return max(ROUNDED, (HALF_FLOORS if dtype in HALVES else FLOORS) * floor)


def traced_bound(dtype: str, floor: float) -> float:
    """Return the largest error against a trace that still counts as equality.

    Args:
        dtype: the run's compute dtype.
        floor: the error of the same quantity in a run of one process perturbed by as much as that dtype rounds.
    """
    return max(EXACT if dtype == "float64" else ROUNDED, FLOORS * floor)


def farthest(runs: Sequence[Mapping[Key, Mapping[str, float]]]) -> dict[Key, dict[str, float]]:
    """Take the largest error over several runs for each key and name."""
    return {
        what: {
            name: max(run[what].get(name, 0.0) for run in runs)
            for name in dict.fromkeys(name for run in runs for name in run[what])
        }
        for what in runs[0]
    }


def sum_floor(parts: Tensor, reference: Tensor) -> float:
    """Estimate a sum's relative rounding error from its (n,) terms in two runs.

    The two sums may be close by chance, so the estimate is at least two standard deviations of a sum whose terms are
    off independently.
    """
    off = parts.double() - reference.double()
    whole = max(abs(reference.double().sum().item()), torch.finfo(torch.float64).tiny)
    return max(off.sum().abs().item(), 2 * off.norm().item()) / whole


# --- describe findings

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
    "optimizer": "the optimizer's {name} after step {step}",
    "parameter": "the parameter {name} after step {step}",
    "random": "the random numbers in {name} (dropout)",
    "alike": "the random numbers in {name} (dropout)",
    "repeated": "the random numbers in {name} (dropout)",
}
"""The place of a difference, by stage; ``later`` names the step where it is not the first."""
STAGES = tuple(WORDS)
"""Stages in the order in which a step computes them and a fault first shows; the last three are random numbers."""

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


def worst(stage: str, name: str, errors: Sequence[float], bound: float, step: int = 1) -> Difference:
    """Return the worst of all ranks' errors, with the ranks beyond the bound unless all are."""
    beyond = tuple(rank for rank, error in enumerate(errors) if not error <= bound)
    return Difference(stage, name, max(errors), bound, step=step, ranks=beyond if len(beyond) < len(errors) else ())


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
        beyond = (d for d in self.differences if d.is_beyond)
        return min(beyond, key=lambda d: (d.step, STAGES.index(d.stage)), default=None)

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

        def rank(d: Difference) -> tuple[bool, float]:
            is_finite = math.isfinite(d.error) and 0 < d.bound < math.inf
            return not d.is_beyond, -d.error / d.bound if is_finite else -math.inf if d.error else 0.0

        return sorted((d for d in self.differences if d.stage == stage), key=rank)

    def lines(self) -> list[str]:
        """Format for people: the first difference, then the worst of every stage."""
        lines = []
        if (first := self.first) is not None:
            words = f"first differs at {first.place}: error {first.error:.1e}, at most {first.bound:.1e} is rounding"
            if first.stage in WHY:
                words = f"wrong are {first.place}: {WHY[first.stage]}"
            elif first.error == math.inf:
                words = (
                    f"first differs at {first.place}: one of the two is missing, has another shape, or is not finite"
                )
            lines.append(f"  {self.dtype}: {words}")
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


def _plain(difference: Difference) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(difference).items()
    }
