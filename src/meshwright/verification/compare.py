"""Comparing outcomes: everything that was computed, in the order in which it was computed, so that the first difference shows where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .equality import Difference, bound_of, ratio, relative_errors
from .outcome import Outcome

Named = Mapping[str, Tensor]

TENSORS = (
    ("initial weight", "initial"),
    ("forward", "forward"),
    ("backward", "backward"),
    ("gradient", "gradients"),
    ("parameter", "parameters"),
)
"""Stage, and the outcome's tensors that it is about."""

NOISE_FLOOR = 1e-12
"""A float64 run whose reordered sums differ by more than this rounds to float32 somewhere inside."""


def differences(found: Outcome, reference: Outcome, floor: Outcome, dtype: str) -> list[Difference]:
    """All that can be compared, in the order of a step; parameters and later steps last.

    Args:
        floor: the reference with its sums in another order.
        dtype: of both.
    """
    rounds = dtype == "float64" and rounds_inside(floor, reference)
    first = [*_of_tensors(found, reference, floor, dtype, rounds, ("initial weight", "forward"))]
    first += _of_numbers("loss", found.losses, reference.losses, floor.losses, dtype, rounds)
    first += _of_tensors(found, reference, floor, dtype, rounds, ("backward", "gradient"))
    first += _of_numbers("norm", found.norms, reference.norms, floor.norms, dtype, rounds)
    first += _of_tensors(found, reference, floor, dtype, rounds, ("parameter",))
    return first


def rounds_inside(floor: Outcome, reference: Outcome) -> bool:
    """Whether a model in float64 computes in float32 somewhere: reordering its sums shows it."""
    return any(error > NOISE_FLOOR for error in relative_errors(floor.gradients, reference.gradients).values())


def _of_tensors(
    found: Outcome, reference: Outcome, floor: Outcome, dtype: str, rounds: bool, stages: Sequence[str]
) -> Iterator[Difference]:
    for stage, attribute in TENSORS:
        if stage not in stages:
            continue
        here, there = getattr(found, attribute), getattr(reference, attribute)
        if stage in ("forward", "backward"):  # wrappers may add modules of their own
            here = {name: value for name, value in here.items() if name in there}
        floors = relative_errors(getattr(floor, attribute), there)
        for name, error in relative_errors(here, there).items():
            bound = 0.0 if stage == "initial weight" else bound_of(dtype, floors.get(name, 0.0), rounds=rounds)
            known = stage == "gradient" and name in here and name in there
            yield Difference(stage, name, error, bound, ratio(here[name], there[name]) if known else None)


def _of_numbers(
    stage: str, found: Sequence[float], reference: Sequence[float], floor: Sequence[float], dtype: str, rounds: bool
) -> Iterator[Difference]:
    for step, (here, there, other) in enumerate(zip(found, reference, floor, strict=True), 1):
        scale = max(abs(there), 1e-300)
        yield Difference(stage, f"step {step}", abs(here - there) / scale, bound_of(dtype, abs(other - there) / scale, rounds=rounds))


def first_beyond(found: Sequence[Difference]) -> Difference | None:
    """Where a fault first shows: the order of a step's computation, later steps' losses and norms after the first step's."""
    beyond = [d for d in found if d.is_beyond]
    return min(beyond, key=lambda d: (_is_later(d), found.index(d)), default=None)


def _is_later(difference: Difference) -> bool:
    return difference.stage in ("loss", "norm") and difference.name != "step 1"
