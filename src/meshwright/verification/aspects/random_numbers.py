"""Check random numbers in a forward: whether a model draws any, and whether ranks draw what they should.

All other comparisons run with dropout switched off; these run with dropout. Ranks that hold different rows must draw
different numbers, ranks that hold the same rows the same, each step new ones, and the recomputation of activation
checkpointing must draw what the forward drew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from meshwright.comparison.equality import ROUNDED
from meshwright.comparison.findings import Difference
from meshwright.comparison.observe import Observed, observing
from meshwright.core.errors import IntegrityError
from meshwright.distributed.process import agree
from meshwright.introspection.signature import Signature
from meshwright.planning.layout import Layout
from meshwright.verification.laid_out import lay_out
from meshwright.verification.one_process import build
from meshwright.verification.problem import Parallelize, Problem, share

HALF = 0.5
"""The largest share of rows that may come out equal on two ranks that draw different numbers."""
ROOT = ""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Nature:
    """The random numbers that a model draws in training mode.

    Attributes:
        drawn: the first module whose output random numbers change; None: the model draws none.
        undrawn: the same with dropout layers switched off: another module draws there, so that one process and a
            layout can be compared in evaluation mode only.
        is_rare: some rows are not changed by random numbers, so that ranks which draw alike do not show.
        shapes: shape of each module's output, without its rows.
    """

    drawn: str | None = None
    undrawn: str | None = None
    is_rare: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Describe the consequences for a comparison."""
        found = []
        if self.undrawn is not None:
            found.append(
                f"compared in evaluation mode: with all dropout layers switched off, the output of"
                f" {_called(self.undrawn)} still changes from forward to forward in training mode"
            )
        if self.is_rare:
            found.append(
                "random numbers change only some of the rows: whether ranks draw different ones was not compared"
            )
        return found


def nature(problem: Problem) -> Nature:
    """Feed one process the same rows twice, and compare the outputs.

    Raises:
        IntegrityError: the outputs differ in evaluation mode too; names the first module.
    """
    one, other = _two_forwards(problem, dropout=True)
    drawn = _first_change(one, other)
    if drawn is None:
        return Nature()
    undrawn = _first_change(*_two_forwards(problem))
    if undrawn is not None:
        always = _first_change(*_two_forwards(replace(problem, evaluating=True)))
        if always is not None:
            raise IntegrityError(
                f"two forwards of the same rows in one process differ, in evaluation mode too (first: the output of"
                f" {_called(always)}), so nothing can be compared: the model draws random numbers in every forward."
                f" Draw them only where self.training is true, or from a torch.Generator that is seeded in the forward"
            )
    is_rare = _equal_rows(one.rows()[0].get(ROOT), other.rows()[0].get(ROOT)) > 0
    return Nature(drawn, undrawn, is_rare, one.shapes)


def _two_forwards(problem: Problem, *, dropout: bool = False) -> tuple[Observed, Observed]:
    """Run forwards of two models with equal weights, at different places in the stream of random numbers."""
    one, other = (build(problem, dropout=dropout) for _ in range(2))
    if [tensor.shape for tensor in _tensors(one)] != [tensor.shape for tensor in _tensors(other)]:
        other = one  # a factory that makes another model each time is another fault, reported later
    with torch.no_grad():
        for here, there in zip(_tensors(one), _tensors(other), strict=True):
            there.copy_(here)
    return _forward(one, problem, 1), _forward(other, problem, 2)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _forward(model: nn.Module, problem: Problem, seed: int) -> Observed:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), observing(model) as observed:
        torch.manual_seed(seed)
        model(**Signature.of(model).inputs(problem.batch(0), torch.device("cpu")))
    return observed


def _first_change(one: Observed, other: Observed) -> str | None:
    """Return the first module whose outputs in the two forwards differ."""
    (here, _), (there, _) = one.rows(), other.rows()
    return next((name for name in {**here, **there} if _equal_rows(here.get(name), there.get(name)) < 1), None)


@dataclass
class Drawn:
    """A rank's two forwards with dropout switched on, of the same step and the next, on the rows of all ranks.

    The first one's backward is included: activation checkpointing recomputes in it."""

    place: tuple[int, int]
    stage: int
    forward: Named
    again: Named
    shapes: dict[str, tuple[int, ...]]
    recomputed: dict[str, float]


def draws(problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None) -> list[Drawn]:
    """Compute the same rows in training mode on every rank, and return the results by rank. Collective."""
    laid_out = lay_out(problem, layout, parallelize_fn, dropout=True)
    rows = share(problem.batch(0), 0, laid_out.place[1])
    of_images = laid_out.of_images()
    with observing(*laid_out.models, unobserved=of_images) as observed:
        laid_out.forward_backward(rows)
    with observing(*laid_out.models, unobserved=of_images) as again:
        laid_out.forward_backward(rows)
    mine = Drawn(
        laid_out.place, laid_out.stage, observed.rows()[0], again.rows()[0], observed.shapes, observed.recomputed
    )
    return _whole_ranks(agree.everybody_says(mine))


def _whole_ranks(drawn: list[Drawn]) -> list[Drawn]:
    """Join what the ranks of a pipeline drew into what ranks with whole models would have drawn."""
    found = [one for one in drawn if one.stage == 0]
    for stage in sorted({one.stage for one in drawn} - {0}):
        for one, other in zip(found, (one for one in drawn if one.stage == stage), strict=True):
            for mine, theirs in ((one.forward, other.forward), (one.again, other.again), (one.shapes, other.shapes)):
                mine.update({name: value for name, value in theirs.items() if name not in mine})  # type: ignore[arg-type]
            one.recomputed.update(other.recomputed)
    return found


def random_differences(drawn: list[Drawn], known: Nature) -> list[Difference]:
    """Compare what ranks drew with each other, and what they recomputed with what they had computed."""
    often = [] if known.is_rare else [*_different(drawn, known), *_repeated(drawn, known)]
    return [*_recomputed(drawn), *often, *_alike(drawn, known)]


def _different(drawn: list[Drawn], known: Nature) -> Iterator[Difference]:
    """Compare ranks that hold different rows, each with its counterpart among the others."""
    name = _first_drawn(drawn, known)
    counts: dict[tuple[int, int], int] = {}
    counterparts: dict[int, list[int]] = {}
    for rank, one in enumerate(drawn):
        counts[one.place] = number = counts.get(one.place, -1) + 1
        counterparts.setdefault(number, []).append(rank)
    shares, alike = [], set()
    for ranks in counterparts.values():
        for rank in ranks:
            for other in ranks[ranks.index(rank) + 1 :]:
                shares.append(_equal_rows(drawn[rank].forward.get(name), drawn[other].forward.get(name)))
                alike |= {rank, other} if shares[-1] > HALF else set()
    if shares:
        yield Difference("random", name, max(shares), HALF, ranks=tuple(sorted(alike)))


def _repeated(drawn: list[Drawn], known: Nature) -> Iterator[Difference]:
    """Compare each rank's draws in two steps; nothing was learnt between them."""
    name = _first_drawn(drawn, known)
    shares = [_equal_rows(rank.forward.get(name), rank.again.get(name)) for rank in drawn]
    beyond = tuple(rank for rank, share in enumerate(shares) if share > HALF)
    yield Difference("repeated", name, max(shares), HALF, ranks=beyond if len(beyond) < len(drawn) else ())


def _first_drawn(drawn: list[Drawn], known: Nature) -> str:
    return known.drawn if known.drawn is not None and all(known.drawn in rank.forward for rank in drawn) else ROOT


def _alike(drawn: list[Drawn], known: Nature) -> Iterator[Difference]:
    """Compare the model's output on ranks with the same rows; a difference names the first whole output at fault."""
    for place in dict.fromkeys(one.place for one in drawn):
        ranks = [rank for rank, one in enumerate(drawn) if one.place == place]
        if len(ranks) < 2:
            continue
        first = drawn[ranks[0]]
        errors = {
            name: max(_apart(rows, drawn[rank].forward.get(name)) for rank in ranks[1:])
            for name, rows in first.forward.items()
            if first.shapes[name] == known.shapes.get(name)
        }
        worst = errors.get(ROOT, 0.0)
        name = next(name for name, error in errors.items() if error > ROUNDED) if worst > ROUNDED else ROOT
        yield Difference("alike", name, worst, ROUNDED, ranks=tuple(ranks) if worst > ROUNDED else ())


def _recomputed(drawn: list[Drawn]) -> Iterator[Difference]:
    for name in drawn[0].forward:
        errors = [rank.recomputed.get(name, 0.0) for rank in drawn]
        if any(name in rank.recomputed for rank in drawn):
            beyond = tuple(rank for rank, error in enumerate(errors) if not error <= ROUNDED)
            yield Difference(
                "recomputed", name, max(errors), ROUNDED, ranks=beyond if len(beyond) < len(errors) else ()
            )


def _equal_rows(one: Tensor | None, other: Tensor | None) -> float:
    """Return the share of rows that are equal."""
    if one is None or other is None or one.shape != other.shape:
        return 0.0
    off = (one.nan_to_num() - other.nan_to_num()).norm(dim=1)
    return (off <= ROUNDED * one.nan_to_num().norm(dim=1)).double().mean().item()


def _apart(one: Tensor, other: Tensor | None) -> float:
    if other is None or one.shape != other.shape:
        return 0.0
    return ((one - other).norm() / max(one.norm().item(), torch.finfo(torch.float64).tiny)).item()


def _called(module: str) -> str:
    return module or "the whole model"
