"""Compare outcomes tensor by tensor, and measure how far rounding alone goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.comparison.equality import (
    EXACT,
    HALVES,
    Difference,
    bound_of,
    farthest,
    ratio,
    relative_errors,
    sum_floor,
    worst,
)
from meshwright.comparison.sketch import is_inside
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import IntegrityError
from meshwright.verification.laid_out import narrows_inside
from meshwright.verification.outcome import Outcome, Reference, reference
from meshwright.verification.problem import Problem
from meshwright.verification.routes import Routes, fewer

# --- measure how far rounding goes

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
    if problem.rounds_to in HALVES:  # far from a run in float32
        noise = torch.finfo(torch_dtype(problem.dtype)).eps / 2 if are_features_cut else 0.0  # rounding is to nearest
        techniques = {key: value for key, value in problem.techniques.items() if not key.startswith("float8")}
        unrounded = replace(problem, dtype="float32", techniques=techniques)
        exact = _started_alike(reference(unrounded, routes=routes), one)
        runs = [one, *_more(problem, ORDERS[:-1], noise, routes)]
        return one, _farthest([_distances(exact, other) for other in runs])
    one.narrows = are_features_cut and problem.dtype == "float64" and narrows_inside(problem)
    noise = torch.finfo(torch.float32).eps if are_features_cut and (problem.dtype == "float32" or one.narrows) else 0.0
    first = _distances(_started_alike(reference(problem, 1, noise=noise, routes=routes), one), one)
    if problem.dtype == "float64" and not (one.narrows or first.round_inside):
        return one, first
    return one, _farthest([first, *(_distances(other, one) for other in _more(problem, ORDERS[1:], noise, routes))])


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
    scores: dict[tuple[int, str], float] = {}
    for key in found.scores.keys() & one.scores.keys():  # the largest difference where both are finite
        here, there = found.scores[key], one.scores[key]
        off = (here - there)[here.isfinite() & there.isfinite()]
        scores[key] = off.abs().amax().item() if off.numel() else 0.0
    return Floors(whole, seen, scores)


def _farthest(runs: Sequence[Floors]) -> Floors:
    scores = {key: max(run.scores.get(key, 0.0) for run in runs) for key in runs[0].scores}
    return Floors(farthest([run.whole for run in runs]), farthest([run.seen for run in runs]), scores)


def state_errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute relative errors, separately for each kind of optimizer state ("exp_avg of …")."""
    kinds: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for side, tensors in ((1, reference), (0, found)):
        for name, tensor in tensors.items():
            kinds.setdefault(name.rpartition(" of ")[0], ({}, {}))[side][name] = tensor
    return {name: error for pair in kinds.values() for name, error in relative_errors(*pair).items()}


# --- compare outcomes

TINY = 1e-300


def differences(
    found: Outcome, reference: Reference, floors: Floors, dtype: str, *, sees_products: bool = False
) -> list[Difference]:
    """Compare all that can be compared; ``sees_products``: products in float8 were counted in both."""
    judge = _Judge(dtype, floors, dtype == "float64" and (reference.narrows or floors.round_inside))
    on_first = [
        *(
            Difference("initial weight", name, error, 0.0)
            for name, error in relative_errors(found.initial, reference.initial).items()
        ),
        *judge.tensors("gradient", found.gradients, reference.gradients),
        *(
            difference
            for step, parameters in found.parameters.items()
            for difference in judge.tensors("parameter", parameters, reference.parameters[step], step)
        ),
    ]
    # one difference per quantity: whole tensors give more detail, sketches cover every rank
    by_rank = {(d.stage, d.name, d.step): d for d in judge.sketches(found, reference)}
    merged: list[Difference] = []
    for whole in on_first:
        other = by_rank.pop((whole.stage, whole.name, whole.step), None)
        if other is not None and other.is_beyond:
            whole = replace(whole, ranks=other.ranks) if whole.is_beyond else replace(other, ratio=whole.ratio)
        merged.append(whole)
    return [
        *merged,
        *by_rank.values(),
        *judge.rows("forward", found, reference),
        *judge.recomputed(found, reference),
        *(fewer(found.products, reference.products) if sees_products else ()),
        *judge.numbers("loss", found.losses, reference.losses),
        *judge.rows("backward", found, reference),
        *judge.numbers("norm", found.norms, reference.norms),
    ]


def notes(found: Outcome, reference: Reference) -> list[str]:
    """Note what was not compared."""
    parts = len(Rows(found, reference, "forward", 1).parts)
    modules = "module has its output" if parts == 1 else "modules have their outputs"
    return [f"{parts} {modules} shared out or never whole: only what comes of them was compared"] if parts else []


class _Judge:
    """A source of bounds and differences for everything that is computed in one dtype."""

    def __init__(self, dtype: str, floors: Floors, rounds: bool):
        self.dtype, self.floors, self.rounds = dtype, floors, rounds

    def bound(self, floor: float, step: int = 1, *, is_stepped: bool = False) -> float:
        # values rounded to float32 have gone through the optimizer, as in a float32 run
        if self.rounds and (step > 1 or is_stepped):
            return bound_of("float32", floor)
        return bound_of(self.dtype, floor, rounds=self.rounds)

    def tensors(self, stage: str, found: Named, reference: Named, step: int = 1) -> Iterator[Difference]:
        """Compare whole tensors, on the first rank."""
        floors = self.floors.whole[stage, step]
        for name, error in relative_errors(found, reference).items():
            known = stage == "gradient" and name in found and name in reference
            along = ratio(found[name], reference[name]) if known else None
            bound = self.bound(floors.get(name, 0.0), step, is_stepped=stage == "parameter")
            yield Difference(stage, name, error, bound, along, step)

    def numbers(self, stage: str, found: Sequence[float], reference: Sequence[float]) -> Iterator[Difference]:
        for step, (here, there) in enumerate(zip(found, reference, strict=True), 1):
            error = abs(here - there) / max(abs(there), TINY)
            bound = bound_of(self.dtype, self.floors.whole[stage, step][""], rounds=self.rounds)
            yield Difference(stage, "", error, bound, step=step)

    def rows(self, stage: str, found: Outcome, reference: Reference) -> Iterator[Difference]:
        """Compare what modules computed of each row, on the rank that has the row."""
        for step, there in getattr(reference.seen[0], stage).items():
            floors = self.floors.seen[stage, step]
            rows = Rows(found, reference, stage, step)
            bounds = {name: self.bound(floors.get(name, 0.0), step) for name in there}
            for name, error in rows.errors().items():
                ranks = rows.ranks(name, bounds[name]) if not error <= bounds[name] else ()
                yield Difference(stage, name, error, bounds[name], step=step, ranks=ranks)

    def recomputed(self, found: Outcome, reference: Reference) -> Iterator[Difference]:
        """Compare what the backward recomputed on a rank with what its forward had computed."""
        for step in reference.seen[0].forward:
            by_rank = [seen.recomputed[step] for seen in found.seen]
            for name in reference.seen[0].forward[step]:
                if any(name in errors for errors in by_rank):
                    own = [errors.get(name, 0.0) for errors in by_rank]
                    yield worst("recomputed", name, own, self.bound(0.0), step)

    def sketches(self, found: Outcome, reference: Reference) -> Iterator[Difference]:
        """Compare every rank's state, also where replicas should be equal."""
        for (stage, step), there in reference.seen[0].sketches.items():
            floors = self.floors.seen[stage, step]
            grouped = [name for name, error in floors.items() if stage == "buffer" and error > NOISE_FLOOR]
            expected = dict(there)
            for name in grouped:  # such a buffer depends on how forwards group rows: at least ranks must agree
                expected[name] = found.seen[0].sketches[stage, step].get(name, there[name])
            by_rank = [state_errors(seen.sketches[stage, step], expected) for seen in found.seen]
            for name in dict.fromkeys(name for errors in by_rank for name in errors):
                bound = self.bound(floors.get(name, 0.0), step, is_stepped=stage in ("parameter", "optimizer"))
                bound = EXACT if stage.startswith("initial") else bound
                yield worst(stage, name, [errors.get(name, 0.0) for errors in by_rank], bound, step)


# --- join what modules computed of a batch's rows from the ranks that have them

Named = Mapping[str, Tensor]


class Rows:
    """The sketches of one stage and step: every rank's, and those of one process for the same rows.

    Ranks that have the same rows (tensor parallelism) compute a module's output whole, as one process does, or as
    partial sums, or each some tokens of every row (whose sketches are partial sums too), or each some features.
    Outputs sharded by features are not compared.

    Attributes:
        parts: modules whose features are sharded over ranks, or whose output is never whole; and modules whose sums
            are reduced together with another's, including those that pass such an output on.
    """

    def __init__(self, found: Outcome, reference: Reference, stage: str, step: int):
        one = reference.seen[0]
        known: Named = {
            name: rows
            for name, rows in getattr(one, stage)[step].items()
            if not is_inside(name, (*found.seen[0].compiled, *found.seen[0].unlike))
        }
        self._by_rank: Sequence[Named] = [getattr(seen, stage)[step] for seen in found.seen]
        self._places = [seen.place for seen in found.seen]
        self._tensor_ranks = [seen.tensor_rank for seen in found.seen]
        self._is_shared = len(found.seen) > self._places[0][1]
        self.parts = {
            name
            for name in known
            if any(seen.shapes.get(name) == () for seen in found.seen)
            or (
                self._is_shared
                and any(seen.shapes.get(name, one.shapes[name]) != one.shapes[name] for seen in found.seen)
            )
        }
        if stage == "backward":
            self.parts |= {name for seen in found.seen for name in seen.graphless.get(step, ())}
        given = one.forward[step]
        elsewhere = [given[path] for path in found.seen[0].summed if path in given]
        self.parts |= {
            name for name in known if name in given and any(torch.equal(given[name], other) for other in elsewhere)
        }
        known = {name: rows for name, rows in known.items() if name not in self.parts}
        self._expected = [
            {name: rows.chunk(ranks)[rank] for name, rows in known.items()} for rank, ranks in self._places
        ]
        self._together = _joined(self._expected)

    def errors(self) -> dict[str, float]:
        """Return the relative error of each module, over all ranks' rows."""
        found = _joined(self._by_rank)  # wrappers may add modules of their own
        errors = relative_errors({name: rows for name, rows in found.items() if name in self._together}, self._together)
        if self._is_shared and any(errors.values()):
            for sums in self._summed():
                summed = relative_errors(_joined(sums), self._together)
                errors |= {name: min(error, summed.get(name, error)) for name, error in errors.items()}
        return errors

    def ranks(self, name: str, bound: float) -> tuple[int, ...]:
        """Return the ranks on whose rows the error exceeds its bound; none where it does on all."""
        beyond = []
        summed = self._summed() if self._is_shared else []
        for rank, found in enumerate(zip(self._by_rank, *summed, strict=True)):
            errors = []  # if all other ranks had computed what one process did
            for own in found:
                patched = [own if other == rank else expected for other, expected in enumerate(self._expected)]
                rows = {name: torch.cat([named[name] for named in patched])} if name in own else {}
                errors.append(relative_errors(rows, {name: self._together[name]})[name])
            if not min(errors) <= bound:
                beyond.append(rank)
        return tuple(beyond) if len(beyond) < len(self._by_rank) else ()

    def _summed(self) -> Iterator[list[Named]]:
        """Yield each rank's rows replaced by sums over the ranks that have the same rows: over all, whose outputs may
        be summands or parts; and over those of one tensor rank, where tensor ranks compute the same.
        """
        for keys in (self._places, [*zip(self._places, self._tensor_ranks, strict=True)]):
            found = []
            for key in keys:
                same = [named for other, named in zip(keys, self._by_rank, strict=True) if other == key]
                names = [name for name in same[0] if name in self._together and all(name in named for named in same)]
                found.append({name: torch.stack([named[name] for named in same]).sum(0) for name in names})
            yield found


def _joined(by_rank: Sequence[Named]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks, for modules that every rank has."""
    return {
        name: torch.cat([named[name] for named in by_rank])
        for name in by_rank[0]
        if all(name in named for named in by_rank)
    }
