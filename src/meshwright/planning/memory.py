"""Estimate a rank's bytes of parameters, gradients and optimizer state, and describe the memory of a step.

Numbers stand for those measured in a run: the bytes, between two operators, of all storages that are live. Activations
and temporary buffers of operators do not count in states. For P elements over N data ranks, in fp32 with AdamW,
16P bytes become 16P (ZeRO-0), 8P + 8P/N (1, while gradients accumulate), 4P + 12P/N (2), 16P/N (3), plus the parameters
gathered and the gradients reduced at a time (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, pairwise
from typing import Literal

from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError
from meshwright.core.names import is_within
from meshwright.planning.collectives import resolved
from meshwright.planning.optimizer import ROOM
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch, Unit

# --- describe the memory of a step


class MemoryUse(StrEnum):
    """The purpose for which bytes are held."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    COMMUNICATION = "communication"
    BUFFERS = "buffers"
    HOST = "host memory"
    """Bytes that a plan for an accelerator keeps in host memory; no part of a peak on the device."""


@dataclass(frozen=True)
class RankMemory:
    """The bytes that a rank holds in a step, by kind.

    Attributes:
        most: for each kind the most at a time.
        peak: at the time at which all kinds together are most.
        idle: gradients and optimizer state that trained parameters would have which no row uses.
    """

    most: Mapping[MemoryUse, int]
    peak: Mapping[MemoryUse, int]
    idle: Mapping[MemoryUse, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The most of all kinds together."""
        return sum(self.peak.values())

    def towards(self, other: RankMemory, share: float) -> RankMemory:
        """Return a rank's bytes on the line through two: 0 gives this one's, 1 the other's."""
        pairs = (self.most, other.most), (self.peak, other.peak), (self.idle, other.idle)
        found = ({k: round(a.get(k, 0) + share * (b.get(k, 0) - a.get(k, 0))) for k in {**a, **b}} for a, b in pairs)
        return RankMemory(*found)


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of the memory of a step.

    Attributes:
        ranks: one for each rank of a pipeline (else one that represents all); empty if nothing is known.
        least: where the bytes are only known to lie in a range, the lower end of each rank's total; ``ranks`` have the
            upper one. Empty otherwise.
        notes: what was assumed, and the reason for a range.
        why_not: the reason why nothing is known.
    """

    ranks: tuple[RankMemory, ...]
    why_not: str = ""
    least: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, rank: int | None = None) -> RankMemory:
        """Return the bytes of a rank of the pipeline; by default of the rank with most."""
        if not self.ranks:
            return RankMemory({}, {})
        return self.ranks[self.fullest if rank is None else rank]

    @property
    def fullest(self) -> int:
        """The rank of the pipeline with most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)


def assumptions(plan: Plan) -> Iterator[str]:
    """Yield the assumptions of an estimate of a plan's memory."""
    if plan.compiled:
        yield (
            "the compiler chooses what compiled blocks keep for their backward: at least their inputs, at most what"
            " they keep uncompiled"
        )
    if plan.experts is not None:
        yield "routers are taken to give all experts as many tokens; uneven ones need more on some ranks"
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        yield "products that overlap with messages (techniques.async_tensor_parallel) count as those that do not"
    if is_accelerator(plan.device):
        yield (
            "activations are those that the CPU's operators keep; the device's context, its libraries' workspaces and"
            " fragmentation come on top"
        )


def composition(pipeline: PipelinePlan, rank: int) -> tuple[object, ...]:
    """Return a key that is equal for ranks whose stages hold and send equally much of a microbatch."""
    kinds = {block: number for number, kind in enumerate(pipeline.kinds) for block in kind.blocks}
    here, ends = pipeline.stages_on(rank), (-1, len(pipeline.stages))
    return tuple(
        (
            tuple(kinds[block] for block in pipeline.stages[number].blocks),
            *("end" if beside in ends else beside in here for beside in (number - 1, number + 1)),
        )
        for number in here
    )


# --- estimate a rank's bytes of parameters, gradients and optimizer state, before any process group exists


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most.

    Attributes:
        parameters: parameters at rest, in the master dtype: a rank's shard, or all.
        gathered: largest number of bytes gathered at a time, in the compute dtype.
        gradients: gradients that the last backward leaves for the optimizer.
        gradients_at_peak: most gradients during forward and backward, those left at the end included.
        reducing: input of a reduction that may still be under way.
        optimizer: optimizer state after the first step.
        moving: most optimizer state on the device at a time during the step, if only the state rests in host memory.
        kept_between_steps: gradients that stay between steps: DDP's buckets.
        in_host_memory: whether parameters at rest, reduced gradients and optimizer state are in host memory.
        pipeline_rank: rank of the pipeline that holds these bytes.
    """

    parameters: int
    gathered: int
    gradients: int
    gradients_at_peak: int
    reducing: int
    optimizer: int
    moving: int = 0
    kept_between_steps: int = 0
    in_host_memory: bool = False
    pipeline_rank: int = 0

    @property
    def beside(self) -> int:
        """Optimizer state that stays beside the parameters."""
        return 0 if self.moving else self.optimizer

    @property
    def at_rest(self) -> int:
        """Bytes between two steps, gradients cleared, without optimizer state that alone rests in host memory."""
        return self.parameters + self.beside + self.kept_between_steps

    def without(self, idle: Mapping[MemoryUse, int]) -> Memory:
        """Return the bytes without the gradients and optimizer state of parameters that no row uses."""
        gradients = self.gradients - idle.get(MemoryUse.GRADIENTS, 0)
        return replace(self, gradients=gradients, optimizer=self.optimizer - idle.get(MemoryUse.OPTIMIZER, 0))

    @property
    def at_peak(self) -> int:
        """Upper bound at any time of a step, without optimizer state that alone rests in host memory."""
        computing = self.gathered + self.gradients_at_peak + self.reducing + self.beside
        return self.parameters + max(computing, self.gradients + self.moving)


def plan_memory(
    plan: Plan,
    *,
    microbatches: int = 1,
    state_tensors_per_parameter: int | None = None,
    pipeline_rank: int | None = None,
) -> Memory:
    """Estimate bytes per rank under a plan.

    Args:
        microbatches: forwards and backwards of a step; gradients of several accumulate, whole unless the plan shards
            them.
        pipeline_rank: rank of the pipeline; by default the one that holds most at its peak.
        state_tensors_per_parameter: number of tensors like the parameter, in its dtype, that a user's optimizer keeps;
            None: the plan's optimizer, whose state may be low-bit.

    Raises:
        ConfigError: a number is too small.
    """
    states = state_tensors_per_parameter
    if microbatches < 1 or (states is not None and states < 0):
        raise ConfigError(f"microbatches = {microbatches} start at 1, state_tensors_per_parameter = {states} at 0")
    if plan.pipeline is None:
        return _memory(plan, [plan.units], microbatches, states, 0)
    ranks = [
        _memory(plan, [plan.stage_units[s] for s in plan.pipeline.stages_on(rank)], microbatches, states, rank)
        for rank in range(plan.pipeline.ranks)
    ]
    return max(ranks, key=lambda memory: memory.at_peak) if pipeline_rank is None else ranks[pipeline_rank]


def _memory(plan: Plan, stages: Sequence[tuple[Unit, ...]], microbatches: int, states: int | None, rank: int) -> Memory:
    units = [unit for stage in stages for unit in stage]
    held = sum(unit.bytes_at_rest // _shards(plan, unit) for unit in units)
    trained = sum(unit.trainable_bytes // _shards(plan, unit) for unit in units)
    optimizer, tensors = plan.optimizer, len(plan.optimizer.row.state)
    rounds = states in (None, tensors)
    elements = sum(unit.rounded_elements for unit in units) if rounds else 0
    state = 0 if states is None else states * trained
    for unit in units:
        full = (unit.state_elements if states is None else 0) - (tensors * unit.rounded_elements if rounds else 0)
        state += full * dtype_bytes(unit.dtype)
    if elements:
        state += optimizer.bytes_of_rounded(elements, sum(unit.rounded_tensors for unit in units))
    moving = 0
    if optimizer.in_host_memory:
        single = max(
            optimizer.bytes_of_rounded(unit.largest, 1)
            if elements and optimizer.rounds(unit.largest)
            else (tensors if states is None else states) * unit.largest * dtype_bytes(unit.dtype)
            for unit in units
        )
        moving = min(state, max(ROOM, single))
    if plan.data.technique != "fully_shard":
        beside, is_ddp = 0, plan.data.technique == "ddp"
        if is_ddp:
            largest = max(p.bytes // p.count for p in plan.parameters if p.trainable)
            delays = microbatches > 1 and not plan.data.sync_grad_accum
            beside = int(beside_buckets(trained, largest, delays=delays))
        kept = trained if is_ddp else 0
        return Memory(held, 0, trained, trained + beside, 0, state, moving, kept, pipeline_rank=rank)
    rooms = [_Room.of(plan, stage) for stage in stages]
    blocks = [block for room in rooms for block in room.every]
    reducing = max((reduced.summed for block in blocks for reduced in block.reduced), default=0)
    # the most bytes gathered at a time: what stays, the computing block, and the one being prefetched
    stays, fetched = 0, 0
    for room in rooms:
        stays += sum(block.gathered for block in (room.root, room.early, *room.blocks[:-1]) if not block.frees)
        stays += sum(block.gathered // block.frees for block in room.blocks if block.frees is not True and block.frees)
        last = room.blocks[-1].gathered if room.blocks else 0
        if plan.pipeline is not None and room.blocks and not room.blocks[-1].frees:
            stays, last = stays + last, 0
        fetched = max(fetched, last)
        for this, following in pairwise(room.blocks):
            if this.frees:
                at_end = following is room.blocks[-1]
                beside = last if at_end else following.gathered if following.frees else 0
                # torch prefetches in backward; in forward this library does, on accelerators
                together = this.gathers_in_backward or is_accelerator(plan.device)
                fetched = max(fetched, this.gathered + beside if together else max(this.gathered, beside))
    return Memory(
        parameters=held,
        gathered=stays + fetched,
        gradients=trained,
        gradients_at_peak=max(trained, *_gradients(plan, rooms, microbatches)),
        reducing=reducing,
        optimizer=state,
        moving=moving,
        in_host_memory=plan.data.cpu_offload,
        pipeline_rank=rank,
    )


def beside_buckets(trained: float, largest: float, *, delays: bool) -> float:
    """Return gradients beside DDP's buckets: all, if several microbatches accumulate first, else one being copied."""
    return trained if delays else largest


@dataclass(frozen=True)
class _Reduced:
    """The bytes of a unit's gradients, as it is reduced.

    Attributes:
        new: as backward makes them, whole.
        summed: whole, in the dtype of the reduction, in which they accumulate.
        apart: ``new`` where a new gradient is not added in place.
        shard: those that a rank keeps.
        behind: those of ``new`` that backward reaches before the blocks, of a unit outside them.
        beside: the most that are new of a unit of another dtype inside, which backward may reach last.
    """

    new: int
    summed: int
    apart: int
    shard: int
    behind: int
    beside: int = 0

    @classmethod
    def of(cls, plan: Plan, unit: Unit) -> _Reduced:
        computed, reduced = plan.precision.computed_in(unit.dtype), plan.precision.reduced_in(unit.dtype)
        new = unit.trainable_elements * dtype_bytes(computed)
        return cls(
            new=new,
            summed=unit.trainable_elements * dtype_bytes(reduced),
            apart=new if computed != reduced else 0,
            shard=unit.trainable_bytes // _shards(plan, unit),
            behind=unit.trainable_behind * dtype_bytes(computed),
        )


@dataclass(frozen=True)
class _Block:
    """A block with the units inside it, or those outside the blocks.

    Attributes:
        gathered: bytes of the gathered parameters.
        reduced: each reduction, in the order of backward.
    """

    gathered: int
    reduced: tuple[_Reduced, ...]
    frees: bool | int
    gathers_in_backward: bool

    @classmethod
    def of(cls, plan: Plan, units: list[Unit]) -> _Block:
        reduced = [_Reduced.of(plan, unit) for unit in units]
        inside = [each.new for each, unit in zip(reduced[1:], units[1:], strict=True) if not unit.experts]
        if inside:
            reduced[0] = replace(reduced[0], beside=max(inside))
        return cls(
            gathered=sum(unit.bytes_gathered for unit in units),
            reduced=tuple(reversed(reduced)),
            frees=units[0].reshard_after_forward if units else False,
            gathers_in_backward=any(unit.gathers_in_backward for unit in units),
        )

    def sum(self, part: Literal["new", "summed", "apart", "shard", "behind"]) -> int:
        """Return the bytes of one kind of all its reductions."""
        return sum(getattr(reduced, part) for reduced in self.reduced)


@dataclass(frozen=True)
class _Room:
    """A model or pipeline stage as its backward sees it.

    Attributes:
        root: what is outside the blocks, and reduced at the end.
        early: units outside the blocks that backward reduces before it reaches the blocks.
        blocks: in forward order.
    """

    root: _Block
    early: _Block
    blocks: tuple[_Block, ...]

    @property
    def every(self) -> tuple[_Block, ...]:
        return (self.root, self.early, *self.blocks)

    @classmethod
    def of(cls, plan: Plan, units: tuple[Unit, ...]) -> _Room:
        together: list[list[Unit]] = []
        for unit in units:
            if unit.outside_blocks:
                continue
            if together and is_within(unit.name, together[-1][0].name):
                together[-1].append(unit)
            else:
                together.append([unit])
        outside = [unit for unit in units if unit.outside_blocks]
        early = [unit for unit in outside if unit.name and unit.trainable_behind]
        root = [unit for unit in outside if unit not in early]
        return cls(_Block.of(plan, root), _Block.of(plan, early), tuple(_Block.of(plan, units) for units in together))


def _shards(plan: Plan, unit: Unit) -> int:
    if plan.data.technique == "fully_shard" and unit.experts and plan.experts is not None:
        return plan.experts.shards
    return plan.shares.shards


def _gradients(plan: Plan, rooms: list[_Room], microbatches: int) -> Iterator[int]:
    """Yield the bytes of gradients at the moments that can be the peak."""
    syncs = bool(plan.data.sync_grad_accum)
    every = [block for room in rooms for block in room.every]
    shards, whole = sum(block.sum("shard") for block in every), sum(block.sum("summed") for block in every)
    behind_apart = [sum(reduced.behind for reduced in room.root.reduced if reduced.apart) for room in rooms]
    if plan.pipeline is not None:
        new_at_once = max(
            behind + max((block.sum("apart") for block in room.blocks), default=0)
            for behind, room in zip(behind_apart, rooms, strict=True)
        )
        if syncs and microbatches > 1:
            yield shards + max(sum(block.sum("summed") for block in room.every) for room in rooms) + new_at_once
        else:
            yield whole + new_at_once
            yield whole + max(room.root.sum("apart") for room in rooms)
        return
    (room,) = rooms
    if microbatches > 1 and not syncs:
        last = max((reduced.apart for reduced in room.blocks[-1].reduced), default=0) if room.blocks else 0
        yield whole + last + behind_apart[0]
        yield room.root.sum("summed") + room.root.sum("apart") + shards - room.root.sum("shard")
        return
    done = shards if microbatches > 1 else room.early.sum("shard")
    # cut sequences do not enter through the first block's arguments
    at_once = 1 if plan.tensor is not None and plan.tensor.sequence_parallel else 0
    for reduced in chain.from_iterable(block.reduced for block in reversed(room.blocks[at_once:])):
        yield done + room.root.sum("behind") + reduced.new + reduced.beside
        done += 0 if microbatches > 1 else reduced.shard
    yield done + room.root.sum("new") + sum(block.sum("new") for block in room.blocks[:at_once])


# --- bound the bytes that ranks hold in a step: by its states from below, by an estimate on both sides


STATES_EXACT = 0.99
"""Model states were found within 1 % of their arithmetic (tests/distributed/test_memory.py)."""
ESTIMATE_EXACT = 0.03
"""Steps were found within 1.4 % of their estimate (docs/benchmarks.md); this is the goal of that comparison."""

LOST_BY_ALLOCATOR = 0.2
"""Fraction by which an allocator holds more than its blocks: a heap of blocks below 32 MiB held 12 and 16 % more than a
model of 125M parameters has tensors (docs/benchmarks.md). Assumed of others."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at its fullest.

    Attributes:
        device: in the memory of an accelerator.
        host: in the memory of the host.
        parts: the summands, by name.
    """

    device: int
    host: int
    parts: Mapping[str, int] = field(default_factory=dict)


def bytes_of_states(plan: Plan, batch: Batch, *, state_tensors: int | None = None) -> list[RankBytes]:
    """Return a lower bound of each rank of a pipeline by its model states; without one, of one rank like all.

    Args:
        state_tensors: tensors of optimizer state for each parameter; None: the plan's.
    """
    microbatches = resolved(plan, batch).microbatches(plan.data_ranks)
    ranks = [None] if plan.pipeline is None else list(range(plan.pipeline.ranks))
    found = []
    for rank in ranks:
        memory = plan_memory(
            plan, microbatches=microbatches, state_tensors_per_parameter=state_tensors, pipeline_rank=rank
        )
        at_rest = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
        whole = memory.gathered if plan.data.gathers_per_step else 0
        backward = {"gradients": memory.gradients_at_peak, "optimizer": memory.beside, "parameters gathered": whole}
        stepping = {"gradients": memory.gradients, "optimizer": memory.moving or memory.beside}
        parts = {"parameters": memory.parameters, **max(backward, stepping, key=lambda held: sum(held.values()))}
        if memory.in_host_memory:
            found.append(RankBytes(0, int(STATES_EXACT * sum(at_rest.values())), at_rest))
        else:
            host = memory.optimizer if memory.moving else 0
            found.append(_placed(plan, STATES_EXACT * sum(parts.values()), host, parts))
    return found


def bytes_at_least(
    plan: Plan, estimate: MemoryEstimate, *, activations: float = float("inf"), optimizer: bool = True
) -> list[RankBytes]:
    """Return a lower bound of each rank by an estimate that has ranks.

    Args:
        activations: bytes above which activations and logits do not count, such as another estimate's.
        optimizer: whether optimizer state is there in forward and backward, as from the second step on.
    """
    found = []
    for number, rank in enumerate(estimate.ranks):
        parts = {kind: size for kind, size in rank.peak.items() if optimizer or kind is not MemoryUse.OPTIMIZER}
        kept = sum(parts.get(kind, 0) for kind in (MemoryUse.ACTIVATIONS, MemoryUse.LOGITS))
        total = estimate.least[number] if estimate.least else rank.total
        total -= max(0, kept - activations) + (rank.total - sum(parts.values()))
        named = {} if estimate.least or kept > activations else {str(kind): size for kind, size in parts.items()}
        found.append(_placed(plan, (1 - ESTIMATE_EXACT) * total, rank.most.get(MemoryUse.HOST, 0), named))
    return found


def bytes_at_most(plan: Plan, estimate: MemoryEstimate) -> list[RankBytes]:
    """Return an upper bound of each rank by an estimate, with an allocator's losses and without what libraries take."""
    more, host = (1 + ESTIMATE_EXACT) * (1 + LOST_BY_ALLOCATOR), MemoryUse.HOST
    return [_placed(plan, more * rank.total, more * rank.most.get(host, 0), {}) for rank in estimate.ranks]


def _placed(plan: Plan, computing: float, host: float, parts: Mapping[str, int]) -> RankBytes:
    """Place what a device computes with; a CPU has it in host memory too."""
    known = {name: size for name, size in parts.items() if size}
    bytes_held = (int(computing), int(host)) if is_accelerator(plan.device) else (0, int(computing + host))
    return RankBytes(*bytes_held, known)
