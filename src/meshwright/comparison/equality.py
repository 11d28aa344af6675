"""What "equal" means: one measure of error for every tensor, one bound per dtype, and the floor that rounding alone sets.

Error of a tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · norm of all references of its kind). (An elementwise relative error says
nothing: the true gradient of a key bias is zero.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Named = Mapping[str, Tensor]
Key = TypeVar("Key")

EXACT = 1e-10
"""Bound in float64."""
ROUNDED = 1e-6
"""Least bound in float32 (in bfloat16 too, where weights and sums are float32), and in float64 for models that cast to float32 inside."""
FLOORS = 4.0
"""So many times the floor is still rounding: the layout orders its sums in another way than the floor's run did."""
HALVES = ("bfloat16", "float16", "float8")
"""Computed in from weights in float32; float8 by some of the products alone."""
HALF_FLOORS = 2.0
"""The same in those, where the floor is the whole distance of one process in bfloat16, say, from one in float32."""


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


def bound_of(dtype: str, floor: float, *, rounds: bool = False) -> float:
    """The largest error that is still equality.

    Args:
        floor: the error of the same thing between runs of one process: in float32 the farthest of some that order their sums differently,
            in bfloat16, float16 and float8 the farthest of some from one that computes in float32. float64 has none.
        rounds: the model rounds to float32 inside, as its floor in float64 shows.
    """
    if dtype == "float64":
        return ROUNDED if rounds else EXACT
    return max(ROUNDED, (HALF_FLOORS if dtype in HALVES else FLOORS) * floor)


def traced_bound(dtype: str, floor: float) -> float:
    """The same against a trace.

    Args:
        dtype: what the run computes in.
        floor: the error of the same thing in a run of one process that was perturbed by as much as that dtype rounds.
    """
    return max(EXACT if dtype == "float64" else ROUNDED, FLOORS * floor)


def farthest(runs: Sequence[Mapping[Key, Mapping[str, float]]]) -> dict[Key, dict[str, float]]:
    """Of each thing the largest error of several runs."""
    return {
        what: {name: max(run[what].get(name, 0.0) for run in runs) for name in dict.fromkeys(name for run in runs for name in run[what])}
        for what in runs[0]
    }


def sum_floor(parts: Tensor, reference: Tensor) -> float:
    """How far a sum may be off by rounding, relative to it, as two runs' summands show.

    The two sums may be close by chance, so no less than two standard deviations of a sum whose summands are off independently.

    Args:
        parts, reference: (n,) the summands in either run.
    """
    off = parts.double() - reference.double()
    whole = max(abs(reference.double().sum().item()), torch.finfo(torch.float64).tiny)
    return max(off.sum().abs().item(), 2 * off.norm().item()) / whole
