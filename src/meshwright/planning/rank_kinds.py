"""Group a world's ranks by their work: ranks of one kind run the same operators on tensors of the same shapes.

Kinds follow from the plan: the stage of a pipeline; which tokens of a row a context rank has; shares that do not
divide, of weights over the tensor axis and of their rows over the sharding axes; a tensor rank's share of a sequence.
Two kinds may turn out alike, ranks of one kind never differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.collectives import own_tokens_of, resolved
from meshwright.planning.experts import EXPERT_AXES
from meshwright.planning.layout import EXPERTS, sharded_dim
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import chunk_size
from meshwright.planning.values import Batch


@dataclass(frozen=True)
class RankKind:
    """Ranks with the same work, in ascending order; ``work`` says in words where it is."""

    ranks: tuple[int, ...]
    work: str


def coordinates(plan: Plan, rank: int) -> dict[Axis, int]:
    """Return a rank's place on every axis of the mesh, outermost first; with experts also on efsdp and ep."""
    found: dict[Axis, int] = {}
    for axis in reversed(WORLD_AXES):
        rank, found[axis] = divmod(rank, plan.size(axis))
    places = {axis: found[axis] for axis in WORLD_AXES}
    if plan.experts is not None:
        places[Axis.EFSDP], places[Axis.EP] = divmod(plan.shares.position(places, EXPERTS), plan.experts.ranks)
    return places


def axes_among(plan: Plan, ranks: Sequence[int]) -> str:
    """Name the axes along which a process group's ranks lie, such as "dp_shard+cp"; of equal groups all names."""
    if len(ranks) < 2:
        return "this rank"
    found = [coordinates(plan, rank) for rank in ranks]
    experts = () if plan.experts is None else EXPERT_AXES
    names: dict[str, None] = {}
    for axes in (WORLD_AXES, experts):  # the axes of a mesh that the ranks fill, their other places being equal
        varied = [axis for axis in axes if len({place[axis] for place in found}) > 1]
        if varied and math.prod(_size(plan, axis) for axis in varied) == len(found):
            names["+".join(varied)] = None
    return "/".join(names) or "world"


def _size(plan: Plan, axis: Axis) -> int:
    sizes = dict(plan.mesh) | dict(plan.experts.mesh if plan.experts is not None else ())
    return sizes.get(axis.value, 1)


def kinds_of_ranks(plan: Plan, facts: ModelFacts, batch: Batch) -> tuple[RankKind, ...]:
    """Group the ranks of a plan's world by their work in a step, in the order of their first ranks.

    Args:
        facts: facts of the model before the plan is applied.
    """
    shares, experts, pipeline, cuts = plan.shares, plan.experts, plan.pipeline, plan.tensor

    @cache
    def shapes(stage: int, tensor: int, shard: int, expert_shard: int) -> Hashable:
        """Return the shapes of dense parameters where they are gathered, of a rank's shards of them, and of its shards
        of experts.
        """
        dense, stacks = set(), set()
        for p in facts.parameters:
            names, stages = (p.name, *p.aliases), (0,) if pipeline is None else pipeline.stages_on(stage)
            if pipeline is not None and not any(pipeline.has(number, name) for number in stages for name in names):
                continue
            if experts is not None and experts.has(p.name):
                local, dim = list(experts.local_shape(p.shape)), experts.sharded_dim(p.shape)
                local[dim] = chunk_size(local[dim], expert_shard, experts.shards)
                stacks.add(tuple(local))
            else:
                shape = p.shape if cuts is None else cuts.local_shape(p.name, p.shape, tensor)
                local = list(shape)
                if shape:
                    dim = sharded_dim(shape, shares.shards) if shape == p.shape else 0
                    local[dim] = chunk_size(shape[dim], shard, shares.shards)
                dense.add((shape, tuple(local)))
        return tuple(sorted(dense)), tuple(sorted(stacks))

    # regions have adapters, whose biases are added on the first tensor rank
    has_adapters = cuts is not None and any(r.region.adapted for kind in cuts.kinds for r in kind.regions)
    # replicas but the first zero what is summed already, before DDP sums it with later microbatches
    several = resolved(plan, batch).microbatches(plan.data_ranks) > 1
    zeroes_sums = plan.data.technique == "ddp" and plan.data.sync_grad_accum is True and several
    places = {rank: coordinates(plan, rank) for rank in range(plan.world)}
    found: dict[Hashable, list[int]] = {}
    for rank, place in places.items():
        stage, tensor, length = place[Axis.PP], place[Axis.TP], own_tokens_of(plan, batch)[place[Axis.CP]]
        if cuts is not None and cuts.sequence_parallel:  # tokens between blocks, padding left out
            length = chunk_size(length, tensor, cuts.ranks)
        work = (
            stage,
            place[Axis.CP],
            length,
            shapes(stage, tensor, shares.position(place, shares.shard_axes), place.get(Axis.EFSDP, 0)),
            tensor == 0 and has_adapters,
            place[Axis.DP_REPLICATE] == 0 and zeroes_sums,
        )
        found.setdefault(work, []).append(rank)
    varied = []  # axes on which kinds have different places
    for axis in (*WORLD_AXES, Axis.EFSDP):
        size = _size(plan, axis)
        if size > 1 and any(len({places[rank][axis] for rank in ranks}) < size for ranks in found.values()):
            varied.append(axis)
    kinds = []
    for ranks in found.values():
        of_kind = {axis: sorted({places[rank][axis] for rank in ranks}) for axis in varied}
        filled = len({tuple(places[rank][axis] for axis in varied) for rank in ranks})
        words = []
        for axis, numbers in of_kind.items():  # ascending, written as runs: "0-2, 5"
            known = set(numbers)
            starts, ends = [n for n in numbers if n - 1 not in known], [n for n in numbers if n + 1 not in known]
            runs = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
            words.append(f"{axis} {', '.join(runs)}")
        some = "" if filled == math.prod(map(len, of_kind.values())) else "some of "
        kinds.append(RankKind(tuple(ranks), some + ", ".join(words) if words else "every rank"))
    return tuple(kinds)
