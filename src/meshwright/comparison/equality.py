"""Define equality: one measure of error for every tensor, one bound per dtype, and a floor set by rounding alone.

Error of a tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · norm of all references of its kind). (An
elementwise relative error is meaningless: the true gradient of a key bias is zero.)
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
            errors[name] = _error(found[name].double(), reference[name].double(), whole)
    return errors


def ratio(found: Tensor, reference: Tensor) -> float | None:
    """Compute ⟨found, reference⟩ / ⟨reference, reference⟩; None where it is undefined or not finite."""
    if found.shape != reference.shape or not (whole := reference.double().norm().item() ** 2):
        return None
    value = (found.double() * reference.double()).sum().item() / whole
    return value if math.isfinite(value) else None


def _error(found: Tensor, reference: Tensor, whole: float) -> float:
    if found.shape != reference.shape:
        return math.inf
    error = (
        (found - reference).norm() / max(reference.norm().item(), 1e-6 * whole, torch.finfo(torch.float64).tiny)
    ).item()
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
    """Estimate a sum's relative rounding error from two runs' terms.

    The two sums may be close by chance, so the estimate is at least two standard deviations of a sum whose terms are
    off independently.

    Args:
        parts, reference: (n,) terms of the sum in either run.
    """
    off = parts.double() - reference.double()
    whole = max(abs(reference.double().sum().item()), torch.finfo(torch.float64).tiny)
    return max(off.sum().abs().item(), 2 * off.norm().item()) / whole
