"""Comparing outcomes: everything that was computed, tensor by tensor and step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from meshwright.comparison.equality import bound_of, ratio, relative_errors, sum_floor
from meshwright.comparison.findings import Difference

from .outcome import Outcome, Reference

Named = Mapping[str, Tensor]

TINY = 1e-300
NOISE_FLOOR = 1e-12
"""A float64 run whose reordered sums differ by more than this rounds to float32 somewhere inside."""


def differences(found: Outcome, reference: Reference, floor: Reference, dtype: str) -> list[Difference]:
    """All that can be compared.

    Args:
        floor: the reference once more, with its sums in another order; where dtype is bfloat16, computed in float32.
        dtype: of what is compared.
    """
    rounds = dtype == "float64" and rounds_inside(floor, reference)
    judge = _Judge(dtype, rounds)
    known = reference.forward  # wrappers may add modules of their own
    forward = {name: rows for name, rows in found.forward.items() if name in known}
    backward = {name: rows for name, rows in found.backward.items() if name in reference.backward}
    return [
        *(Difference("initial weight", name, error, 0.0) for name, error in relative_errors(found.initial, reference.initial).items()),
        *judge.tensors("forward", forward, known, floor.forward),
        *judge.numbers("loss", found.losses, reference.losses, _floors(floor.loss_parts, reference.loss_parts)),
        *judge.tensors("backward", backward, reference.backward, floor.backward),
        *judge.tensors("gradient", found.gradients, reference.gradients, floor.gradients),
        *judge.numbers("norm", found.norms, reference.norms, _floors(floor.norm_parts, reference.norm_parts)),
        *(
            difference
            for step, parameters in found.parameters.items()
            for difference in judge.tensors("parameter", parameters, reference.parameters[step], floor.parameters[step], step)
        ),
    ]


def rounds_inside(floor: Outcome, reference: Outcome) -> bool:
    """Whether a model in float64 computes in float32 somewhere: reordering its sums shows it."""
    return any(error > NOISE_FLOOR for error in relative_errors(floor.gradients, reference.gradients).values())


class _Judge:
    """Knows the bound of everything in one dtype."""

    def __init__(self, dtype: str, rounds: bool):
        self.dtype, self.rounds = dtype, rounds

    def bound(self, floor: float) -> float:
        return bound_of(self.dtype, floor, rounds=self.rounds)

    def tensors(self, stage: str, found: Named, reference: Named, floor: Named, step: int = 1) -> Iterator[Difference]:
        floors = relative_errors(floor, reference)
        for name, error in relative_errors(found, reference).items():
            known = stage == "gradient" and name in found and name in reference
            along = ratio(found[name], reference[name]) if known else None
            yield Difference(stage, name, error, self.bound(floors.get(name, 0.0)), along, step)

    def numbers(self, stage: str, found: Sequence[float], reference: Sequence[float], floors: Sequence[float]) -> Iterator[Difference]:
        for step, (here, there, floor) in enumerate(zip(found, reference, floors, strict=True), 1):
            yield Difference(stage, "", abs(here - there) / max(abs(there), TINY), self.bound(floor), step=step)


def _floors(parts: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    return [sum_floor(mine, theirs) for mine, theirs in zip(parts, reference, strict=True)]
