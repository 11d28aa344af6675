"""What "equal" means: one measure of error for every tensor, one bound per dtype, and the floor that rounding alone sets.

Error of a tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · norm of all references of its kind). (An elementwise relative error says
nothing: the true gradient of a key bias is zero.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Named = Mapping[str, Tensor]

EXACT = 1e-10
"""Bound in float64."""
ROUNDED = 1e-6
"""Least bound in float32, and in float64 for models that cast to float32 inside."""
FLOORS = 4.0
"""So many times the floor is still rounding: the layout orders its sums in another way than the floor's run did."""


def relative_errors(found: Named, reference: Named) -> dict[str, float]:
    """The error of each tensor, by name; infinite where it is missing on one side, has another shape, or is not finite."""
    whole = math.sqrt(sum(r.double().norm().item() ** 2 for r in reference.values()))
    errors = dict.fromkeys(
        [*(name for name in reference if name not in found), *(name for name in found if name not in reference)], math.inf
    )
    for name in reference:
        if name in found:
            errors[name] = _error(found[name].double(), reference[name].double(), whole)
    return errors


def ratio(found: Tensor, reference: Tensor) -> float | None:
    """⟨found, reference⟩ / ⟨reference, reference⟩."""
    if found.shape != reference.shape or not (whole := reference.double().norm().item() ** 2):
        return None
    value = (found.double() * reference.double()).sum().item() / whole
    return value if math.isfinite(value) else None


def _error(found: Tensor, reference: Tensor, whole: float) -> float:
    if found.shape != reference.shape:
        return math.inf
    error = ((found - reference).norm() / max(reference.norm().item(), 1e-6 * whole, torch.finfo(torch.float64).tiny)).item()
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Difference:
    """One thing that was compared."""

    stage: str
    """forward, loss, backward, gradient, norm, parameter; see ``STAGES``."""
    name: str
    """A module, a parameter, or "step 2"."""
    error: float
    bound: float
    ratio: float | None = None
    """How many times the reference it is, along the reference; None where that says nothing."""

    @property
    def is_beyond(self) -> bool:
        return not self.error <= self.bound


STAGES = ("initial weight", "forward", "loss", "backward", "gradient", "norm", "parameter")
"""In the order in which a step computes them, and so in which a fault first shows."""


def bound_of(dtype: str, floor: float, *, rounds: bool) -> float:
    """The largest error that is still equality.

    Args:
        floor: the error of the same thing between two runs of one process that order their sums differently; counts in float32.
        rounds: the model rounds to float32 inside, as its floor in float64 shows.
    """
    if dtype == "float64":
        return ROUNDED if rounds else EXACT
    return max(ROUNDED, FLOORS * floor)
