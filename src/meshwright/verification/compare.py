"""Compare outcomes: everything that was computed, tensor by tensor, step by step and rank by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from meshwright.comparison.equality import EXACT, bound_of, ratio, relative_errors
from meshwright.comparison.findings import Difference

from .aspects.float8 import fewer
from .aspects.rows import Rows
from .floors import NOISE_FLOOR, Floors, state_errors
from .outcome import Outcome, Reference

Named = Mapping[str, Tensor]

TINY = 1e-300


def differences(
    found: Outcome, reference: Reference, floors: Floors, dtype: str, *, sees_products: bool = False
) -> list[Difference]:
    """Compare all that can be compared.

    Args:
        floors: how far rounding may move each value.
        dtype: dtype of the compared computation.
        sees_products: products in float8 were counted in both.
    """
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
    return [
        *_merged(on_first, list(judge.sketches(found, reference))),
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
            yield Difference(
                stage,
                name,
                error,
                self.bound(floors.get(name, 0.0), step, is_stepped=stage == "parameter"),
                along,
                step,
            )

    def numbers(self, stage: str, found: Sequence[float], reference: Sequence[float]) -> Iterator[Difference]:
        for step, (here, there) in enumerate(zip(found, reference, strict=True), 1):
            error = abs(here - there) / max(abs(there), TINY)
            yield Difference(
                stage,
                "",
                error,
                bound_of(self.dtype, self.floors.whole[stage, step][""], rounds=self.rounds),
                step=step,
            )

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
                errors = [errors[name] for errors in by_rank if name in errors]
                if errors:
                    yield _worst(
                        "recomputed", name, [errors.get(name, 0.0) for errors in by_rank], self.bound(0.0), step
                    )

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
                stepped = stage in ("parameter", "optimizer")
                bound = (
                    EXACT
                    if stage.startswith("initial")
                    else self.bound(floors.get(name, 0.0), step, is_stepped=stepped)
                )
                yield _worst(stage, name, [errors.get(name, 0.0) for errors in by_rank], bound, step)


def _worst(stage: str, name: str, errors: Sequence[float], bound: float, step: int) -> Difference:
    """Return the worst of all ranks' errors, with the ranks beyond the bound unless all are."""
    beyond = tuple(rank for rank, error in enumerate(errors) if not error <= bound)
    return Difference(stage, name, max(errors), bound, step=step, ranks=beyond if len(beyond) < len(errors) else ())


def _merged(on_first: Sequence[Difference], by_rank: Sequence[Difference]) -> Iterator[Difference]:
    """Yield one difference per quantity: whole tensors give more detail, sketches cover every rank."""
    others = {(d.stage, d.name, d.step): d for d in by_rank}
    for whole in on_first:
        other = others.pop((whole.stage, whole.name, whole.step), None)
        if other is None or not other.is_beyond:
            yield whole
        else:
            yield replace(whole, ranks=other.ranks) if whole.is_beyond else replace(other, ratio=whole.ratio)
    yield from others.values()
