"""Group a world's ranks by their work: ranks of one kind run the same operators on tensors of the same shapes.

Kinds follow from the plan: the stage of a pipeline; which tokens of a row a context rank has; shares that do not
divide, of weights over the tensor axis and of their rows over the sharding axes; a tensor rank's share of a sequence.
Two kinds may turn out alike, ranks of one kind never differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.parts import is_plain, ranges
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.planning.collectives import own_tokens_of, resolved
from meshwright.planning.experts import EXPERT_AXES
from meshwright.planning.layout import EXPERTS
from meshwright.planning.plan import Plan
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
        among = 0
        for axis in EXPERTS:
            among = among * plan.size(axis) + places[axis]
        places[Axis.EFSDP], places[Axis.EP] = divmod(among, plan.experts.ranks)
    return places


def axes_among(plan: Plan, ranks: Sequence[int]) -> str:
    """Name the axes along which a process group's ranks lie, such as "dp_shard+cp"; of equal groups all names."""
    if len(ranks) < 2:
        return "this rank"
    found = [coordinates(plan, rank) for rank in ranks]
    experts = () if plan.experts is None else EXPERT_AXES
    names = [_names(plan, axes, found) for axes in (WORLD_AXES, experts)]
    return "/".join(dict.fromkeys(filter(None, names))) or "world"


def _names(plan: Plan, axes: Sequence[Axis], places: list[dict[Axis, int]]) -> str:
    """Name the axes of a mesh that the places fill, each others' being equal; "" where they fill none."""
    varied = [axis for axis in axes if len({place[axis] for place in places}) > 1]
    return "+".join(varied) if math.prod(_size(plan, axis) for axis in varied) == len(places) else ""


def _size(plan: Plan, axis: Axis) -> int:
    sizes = dict(plan.mesh) | dict(plan.experts.mesh if plan.experts is not None else ())
    return sizes.get(axis.value, 1)


def kinds_of_ranks(plan: Plan, facts: ModelFacts, batch: Batch) -> tuple[RankKind, ...]:
    """Group the ranks of a plan's world by their work in a step, in the order of their first ranks.

    Args:
        facts: facts of the model before the plan is applied.
    """
    works = _Works(plan, facts, batch)
    found: dict[Hashable, list[int]] = {}
    for rank in range(plan.world):
        found.setdefault(works.of(rank), []).append(rank)
    varied = [axis for axis in (*WORLD_AXES, Axis.EFSDP) if _tells_apart(plan, axis, list(found.values()))]
    return tuple(RankKind(tuple(ranks), _words(plan, ranks, varied)) for ranks in found.values())


def _tells_apart(plan: Plan, axis: Axis, kinds: list[list[int]]) -> bool:
    """Return whether kinds have different places on an axis."""
    size = _size(plan, axis)
    return size > 1 and any(len({coordinates(plan, rank)[axis] for rank in ranks}) < size for ranks in kinds)


def _words(plan: Plan, ranks: Sequence[int], axes: Sequence[Axis]) -> str:
    """Describe ranks by their places on the axes that tell kinds apart."""
    found = [coordinates(plan, rank) for rank in ranks]
    places = {axis: sorted({place[axis] for place in found}) for axis in axes}
    if not places:
        return "every rank"
    filled = len({tuple(place[axis] for axis in axes) for place in found}) == math.prod(map(len, places.values()))
    return ("" if filled else "some of ") + ", ".join(f"{axis} {_runs(numbers)}" for axis, numbers in places.items())


def _runs(numbers: Sequence[int]) -> str:
    """Write ascending numbers as runs: "0-2, 5"."""
    starts = [n for place, n in enumerate(numbers) if not place or n != numbers[place - 1] + 1]
    ends = [n for place, n in enumerate(numbers) if place + 1 == len(numbers) or numbers[place + 1] != n + 1]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


class _Works:
    """The work of each rank, as a value that can be compared."""

    def __init__(self, plan: Plan, facts: ModelFacts, batch: Batch):
        self.plan, self.batch, self.facts = plan, batch, facts
        self.dense, self.experts = cache(self._dense), cache(self._experts)

    def of(self, rank: int) -> Hashable:
        plan, place = self.plan, coordinates(self.plan, rank)
        shard = 0
        for axis in plan.shares.shard_axes:
            shard = shard * plan.size(axis) + place[axis]
        stage, tensor = place[Axis.PP], place[Axis.TP]
        return (
            stage,
            place[Axis.CP],
            self._tokens(place),
            self.dense(stage, tensor, shard),
            self.experts(stage, place.get(Axis.EFSDP, 0)),
            tensor == 0 and self._has_adapters,
            place[Axis.DP_REPLICATE] == 0 and self._zeroes_sums,
        )

    @property
    def _zeroes_sums(self) -> bool:
        """Whether replicas but the first zero what is summed already, before DDP sums it with later microbatches."""
        data = self.plan.data
        several = resolved(self.plan, self.batch).microbatches(self.plan.data_ranks) > 1
        return data.technique == "ddp" and data.sync_grad_accum is True and several

    @property
    def _has_adapters(self) -> bool:
        """Whether regions have adapters, whose biases are added on the first tensor rank."""
        tensor = self.plan.tensor
        return tensor is not None and any(r.region.adapted for kind in tensor.kinds for r in kind.regions)

    def _tokens(self, place: dict[Axis, int]) -> int:
        """Count the tokens of a row that a rank has between blocks, padding left out."""
        tensor, length = self.plan.tensor, own_tokens_of(self.plan, self.batch)[place[Axis.CP]]
        if tensor is None or not tensor.sequence_parallel:
            return length
        share = -(-length // tensor.ranks)
        return max(0, min(share, length - place[Axis.TP] * share))

    def _dense(self, stage: int, tensor: int, shard: int) -> Hashable:
        """Return the shapes of dense parameters where they are gathered, and of this rank's shards of them."""
        cut = {self._cut(p, tensor) for p in self._of_stage(stage) if not self._is_expert(p)}
        return tuple(sorted((shape, self._sharded(shape, shard)) for shape in cut))

    def _experts(self, stage: int, shard: int) -> Hashable:
        experts = self.plan.experts
        if experts is None:
            return ()
        stacks = [p.shape for p in self._of_stage(stage) if self._is_expert(p)]
        found = set()
        for shape in stacks:
            local, dim = list(experts.local_shape(shape)), experts.sharded_dim(shape)
            local[dim] = _chunk(local[dim], shard, experts.shards)
            found.add(tuple(local))
        return tuple(sorted(found))

    def _is_expert(self, parameter: ParameterFact) -> bool:
        return self.plan.experts is not None and self.plan.experts.has(parameter.name)

    def _of_stage(self, rank: int) -> Iterator[ParameterFact]:
        pipeline = self.plan.pipeline
        for parameter in self.facts.parameters:
            names = (parameter.name, *parameter.aliases)
            if pipeline is None or any(pipeline.has(s, name) for s in pipeline.stages_on(rank) for name in names):
                yield parameter

    def _cut(self, parameter: ParameterFact, rank: int) -> tuple[int, ...]:
        tensor, shape = self.plan.tensor, parameter.shape
        cut = None if tensor is None else tensor.cut_of(parameter.name, shape)
        if tensor is None or cut is None:
            return shape
        dim, parts = cut
        if is_plain(parts, tensor.ranks) and not parts[0].fits(tensor.ranks):
            size = _chunk(shape[dim], rank, tensor.ranks)
        else:
            size = sum(high - low for low, high in ranges(parts, rank, tensor.ranks))
        return (*shape[:dim], size, *shape[dim + 1 :])

    def _sharded(self, shape: tuple[int, ...], shard: int) -> tuple[int, ...]:
        return (_chunk(shape[0], shard, self.plan.shares.shards), *shape[1:]) if shape else shape


def _chunk(size: int, rank: int, ranks: int) -> int:
    """Return the size of a rank's part, as torch.chunk cuts."""
    share = -(-size // ranks)
    return max(0, min(share, size - rank * share))
