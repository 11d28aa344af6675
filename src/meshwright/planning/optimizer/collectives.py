"""List the messages of optimizers that need whole matrices, or sums over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.core.axes import Axis
from meshwright.core.parts import LocalRange, is_plain, runs_of_chunk, runs_of_parts
from meshwright.introspection.facts import ParameterFact
from meshwright.planning.plan import Plan
from meshwright.planning.shares import EXPERTS
from meshwright.planning.values import Collective

from .owners import Box, Matrix, boxes_of, matrices_of, messages_of, rounds_of, sent_by

STAGE = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes whose ranks hold parts or copies of the same matrices."""


def optimizer_collectives(plan: Plan, parameters: Sequence[ParameterFact]) -> Iterator[Collective]:
    """List the messages of the optimizer's step for a rank's parameters."""
    yield from matrix_collectives(plan, parameters)
    yield from sum_collectives(plan, parameters)


def matrix_collectives(plan: Plan, parameters: Sequence[ParameterFact]) -> Iterator[Collective]:
    """List the all-to-alls of a step, to owners and back, with the elements of the rank that sends most."""
    shares = plan.shares
    ranks = shares.size(*STAGE)
    if ranks == 1 or not plan.optimizer.row.by_role:
        return
    sent, calls = sent_elements(plan, parameters)
    if calls:
        axes = [axis.value for axis in STAGE if shares.size(axis) > 1]
        unit, dtype = "parts of matrices", next(p.dtype for p in parameters if p.trainable)
        yield Collective("all_to_all", " × ".join(axes), ranks, unit, max(sent), dtype, "step", calls, to_others=True)


def sum_collectives(plan: Plan, parameters: Sequence[ParameterFact]) -> Iterator[Collective]:
    """List the all-reduces of an optimizer that sums over parts of cut matrices: first squares, then updates."""
    if not plan.optimizer.row.sums_parts:
        return
    shares, experts = plan.shares, plan.experts
    packs: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for p in parameters:
        if not p.trainable or p.name in plan.frozen:
            continue
        if experts is not None and experts.has(p.name):
            axes = [(Axis.EFSDP, experts.shards), (Axis.EP, experts.ranks)]
        else:
            cut = plan.tensor is not None and plan.tensor.cut_of(p.name, p.shape) is not None
            axes = [(Axis.DP_SHARD, shares.shards), (Axis.TP, shares.size(Axis.TP) if cut else 1)]
        cut_by = tuple((axis.value, size) for axis, size in axes if size > 1)
        if any(size == plan.world for _, size in cut_by):  # one group of all ranks, whatever the axis
            cut_by = next((pack for pack in packs if any(size == plan.world for _, size in pack)), cut_by)
        packs.setdefault(cut_by, []).append(size_of_sums(p.shape))
    dtype = "float64" if any(p.dtype == "float64" for p in parameters if p.trainable) else "float32"
    for cut_by, sizes in packs.items():
        for elements, unit in ((sum(sizes), "squares of rows and columns"), (len(sizes), "squares of updates")):
            for axis, ranks in cut_by:
                yield Collective("all_reduce", axis, ranks, unit, elements, dtype, "step")


def size_of_sums(shape: Sequence[int]) -> int:
    """Count the numbers that ranks sum for a parameter: its square, and those of its gradient's rows and columns."""
    return 1 if len(shape) < 2 else 1 + math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def sent_elements(plan: Plan, parameters: Iterable[ParameterFact]) -> tuple[list[int], int]:
    """Count the elements that each rank of a stage sends to others in a step, and the messages of each."""
    ranks = plan.shares.size(*STAGE)
    known: dict[tuple, list[Matrix]] = {}
    matrices: list[Matrix] = []
    for p in parameters:
        if p.trainable and p.hidden and p.name not in plan.frozen:
            cut = plan.tensor.cut_of(p.name, p.shape) if plan.tensor is not None else None
            key = (p.shape, cut, plan.experts is not None and plan.experts.has(p.name))
            if key not in known:
                known[key] = matrices_of(p.shape, [_boxes(plan, p, rank) for rank in range(ranks)])
            matrices += known[key]
    rounds = rounds_of(matrices, ranks)
    return sent_by(matrices, rounds, ranks), messages_of(matrices, rounds)


def _boxes(plan: Plan, p: ParameterFact, rank: int) -> list[Box]:
    """List the boxes of a parameter that a rank of a stage holds."""
    shares, experts = plan.shares, plan.experts
    where: dict[Axis, int] = {}
    left = rank
    for axis in reversed(STAGE):
        left, where[axis] = divmod(left, shares.size(axis))
    runs = [[LocalRange(0, size)] for size in p.shape]
    if experts is not None and experts.has(p.name):
        shard, share = divmod(_position(shares.mesh, where, EXPERTS), experts.ranks)
        runs[0] = runs_of_chunk(runs[0], share, experts.ranks)
        dim = experts.sharded_dim(p.shape)
        runs[dim] = runs_of_chunk(runs[dim], shard, experts.shards)
        return boxes_of(runs)
    if plan.tensor is not None and (cut := plan.tensor.cut_of(p.name, p.shape)) is not None:
        dim, parts = cut
        place = where[Axis.TP], plan.tensor.ranks
        runs[dim] = runs_of_chunk(runs[dim], *place) if is_plain(parts, place[1]) else runs_of_parts(parts, *place)
    runs[0] = runs_of_chunk(runs[0], _position(shares.mesh, where, shares.shard_axes), shares.shards)
    return boxes_of(runs)


def _position(sizes: Mapping[str, int], where: Mapping[Axis, int], axes: Iterable[Axis]) -> int:
    """Return a rank's position among those along some axes, as one axis."""
    position = 0
    for axis in axes:
        position = position * sizes.get(axis.value, 1) + where[axis]
    return position
