"""Measure how far rounding goes: one process computes a problem several times, rounding differently each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.comparison.equality import HALVES, farthest, relative_errors, sum_floor
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import IntegrityError

from .aspects.routes import Routes
from .one_process import narrows_inside
from .outcome import Reference, reference
from .problem import Problem

Errors = dict[tuple[str, int], dict[str, float]]
"""(stage, step) → name → relative error."""

ORDERS = (1, 2, 3)
"""Rows per forward. One run may be close by chance where a tensor is small; several rarely are."""
SHAKEN = 5
"""Number of further runs, of all rows at once, with random changes to outputs.

The gradient of a norm of two elements is off along one direction, like one number: in one case of seven three draws
of it are all within 0.7 standard deviations, and then four times the farthest is less than three of them; with eight
draws that is one case of two hundred."""
NOISE_FLOOR = 1e-12
"""Difference by reordered sums above which a float64 run rounds to float32 somewhere inside."""


@dataclass(frozen=True)
class Floors:
    """Bounds on how far rounding may move what is compared.

    Attributes:
        whole: relative errors of gradients, parameters, losses and norms.
        seen: relative errors of the sketches of what modules compute, and of every step's state.
        scores: by step and stack of experts, absolute errors of the scores that experts are chosen by.
    """

    whole: Errors
    seen: Errors
    scores: dict[tuple[int, str], float] = field(default_factory=dict)

    @property
    def round_inside(self) -> bool:
        """Whether a model in float64 computes in float32 somewhere: reordering its sums shows it."""
        return any(error > NOISE_FLOOR for error in self.whole["gradient", 1].values())


def references(
    problem: Problem, *, are_features_cut: bool = False, always_clips: bool = False, routes: Sequence[Routes] = ()
) -> tuple[Reference, Floors]:
    """Compute the oracle, and how far rounding moves it.

    In float32 the floor is the farthest of three more runs, which take one, two and three rows at a time and so add
    up in other orders. In bfloat16 and float16 it is the farthest of three runs (all rows at a time, one, two) from
    one in float32. In float64, one more run shows whether the model rounds to float32 somewhere. Where features are
    sharded, five more runs are made.

    Args:
        are_features_cut: the layout adds up features in another order too, which one process cannot: every module's
            output is changed by as much as that rounds; in float64 too, if the model computes in float32 somewhere.
        always_clips: where the first gradient is not longer than max_norm, clip to half its norm: else a fault in
            clipping does not show.
        routes: routes of each step's batch; by default all runs use those of the first, so that only rounding sets
            them apart.

    Raises:
        IntegrityError: two runs begin with different weights or buffers.
    """
    one = reference(problem, always_clips=always_clips, routes=routes)
    routes = one.routes if any(one.routes) else ()
    problem = replace(problem, max_norm=one.max_norm)
    if problem.rounds_to in HALVES:
        return one, _from_float32(problem, one, are_features_cut, routes)
    one.narrows = are_features_cut and problem.dtype == "float64" and narrows_inside(problem)
    noise = torch.finfo(torch.float32).eps if are_features_cut and (problem.dtype == "float32" or one.narrows) else 0.0
    first = _distances(_started_alike(reference(problem, 1, noise=noise, routes=routes), one), one)
    if problem.dtype == "float64" and not (one.narrows or first.round_inside):
        return one, first
    return one, _farthest([first, *(_distances(other, one) for other in _more(problem, ORDERS[1:], noise, routes))])


def _from_float32(problem: Problem, one: Reference, are_features_cut: bool, routes: Sequence[Routes]) -> Floors:
    noise = torch.finfo(torch_dtype(problem.dtype)).eps / 2 if are_features_cut else 0.0  # rounding is to nearest
    exact = _started_alike(reference(problem.unrounded, routes=routes), one)
    return _farthest(
        [_distances(exact, one), *(_distances(exact, other) for other in _more(problem, ORDERS[:-1], noise, routes))]
    )


def _more(problem: Problem, orders: Sequence[int], noise: float, routes: Sequence[Routes]) -> Iterator[Reference]:
    """Run once for each number of rows, and where there is noise also several times with all rows at once."""
    for seed, rows in enumerate((*orders, *[0] * (SHAKEN if noise else 0)), 1):
        yield reference(problem, rows, noise=noise, seed=seed, routes=routes)


def _started_alike(other: Reference, one: Reference) -> Reference:
    for what, here, there in (("weights", one.initial, other.initial), ("buffers", one.buffers, other.buffers)):
        for name in {**here, **there}:
            if name not in here or name not in there or not here[name].equal(there[name]):
                raise IntegrityError(
                    f"two one-process runs begin with different {what} (first: {name}), so nothing can be compared: the"
                    f" model factory draws random numbers that the seed does not govern. Seed it inside the factory"
                )
    return other


def _distances(found: Reference, one: Reference) -> Floors:
    whole = {("gradient", 1): relative_errors(found.gradients, one.gradients)}
    whole |= {
        ("parameter", step): relative_errors(found.parameters[step], kept) for step, kept in one.parameters.items()
    }
    for stage, parts, theirs in (
        ("loss", found.loss_parts, one.loss_parts),
        ("norm", found.norm_parts, one.norm_parts),
    ):
        whole |= {(stage, step): {"": sum_floor(*pair)} for step, pair in enumerate(zip(parts, theirs, strict=True), 1)}
    mine, theirs = found.seen[0], one.seen[0]
    seen = {
        (stage, step): relative_errors(getattr(mine, stage)[step], rows)
        for stage in ("forward", "backward")
        for step, rows in getattr(theirs, stage).items()
    }
    seen |= {key: state_errors(mine.sketches[key], there) for key, there in theirs.sketches.items()}
    return Floors(
        whole, seen, {key: _apart(found.scores[key], there) for key, there in one.scores.items() if key in found.scores}
    )


def _apart(found: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference where both are finite."""
    both = found.isfinite() & reference.isfinite()
    return (found - reference)[both].abs().amax().item() if both.any() else 0.0


def _farthest(runs: Sequence[Floors]) -> Floors:
    scores = {key: max(run.scores.get(key, 0.0) for run in runs) for key in runs[0].scores}
    return Floors(farthest([run.whole for run in runs]), farthest([run.seen for run in runs]), scores)


def state_errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute relative errors, separately for each kind of optimizer state ("exp_avg of …")."""
    kinds = dict.fromkeys(name.rpartition(" of ")[0] for name in (*reference, *found))
    errors = {}
    for kind in kinds:
        errors |= relative_errors(dict(_of_kind(found, kind)), dict(_of_kind(reference, kind)))
    return errors


def _of_kind(tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors.items() if name.rpartition(" of ")[0] == kind)
