"""Estimate a rank's bytes of parameters, gradients and optimizer state, before any process group exists.

Activations and temporary buffers of operators are not counted. For P elements over N data ranks, in fp32 with AdamW,
16P bytes become 16P (ZeRO-0), 8P + 8P/N (1, while gradients accumulate), 4P + 12P/N (2), 16P/N (3), plus the parameters
gathered and the gradients reduced at a time (arXiv 1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError
from meshwright.core.names import is_within
from meshwright.planning.optimizer.plan import ROOM, OptimizerPlan
from meshwright.planning.values import Unit

if TYPE_CHECKING:
    from meshwright.planning.plan import Plan


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
    dtypes, master = plan.precision, dtype_bytes(plan.precision.master)
    units = [unit for stage in stages for unit in stage]
    held = sum(unit.resting_bytes(plan.precision.master) // _shards(plan, unit) for unit in units)
    trained = sum(unit.trainable_elements // _shards(plan, unit) for unit in units)
    optimizer = _optimizer(plan.optimizer, units, trained, states, master)
    if plan.data.technique != "fully_shard":
        gradients = (trained + _beside_buckets(plan, trained, microbatches)) * master
        kept = trained * master if plan.data.technique == "ddp" else 0
        return Memory(held, 0, trained * master, gradients, 0, *optimizer, kept, pipeline_rank=rank)
    rooms = [_Room.of(plan, stage) for stage in stages]
    reducing = max((unit.trainable_elements for unit in units), default=0) * dtype_bytes(dtypes.reduce)
    return Memory(
        parameters=held,
        gathered=_gathered(plan, rooms),
        gradients=trained * master,
        gradients_at_peak=max(trained * master, *_gradients(plan, rooms, microbatches)),
        reducing=reducing,
        optimizer=optimizer[0],
        moving=optimizer[1],
        in_host_memory=plan.data.cpu_offload,
        pipeline_rank=rank,
    )


def _optimizer(
    optimizer: OptimizerPlan, units: Sequence[Unit], trained: int, states: int | None, master: int
) -> tuple[int, int]:
    """Return the bytes of the state, and the most of them that move at a time."""
    tensors = len(optimizer.row.state)
    elements = sum(unit.rounded_elements for unit in units) if states in (None, tensors) else 0
    total = (sum(unit.state_elements for unit in units) if states is None else states * trained) - tensors * elements
    total *= master
    if elements:
        total += optimizer.bytes_of_rounded(elements, sum(unit.rounded_tensors for unit in units))
    if not optimizer.in_host_memory:
        return total, 0
    largest = max((unit.largest for unit in units), default=0)
    single = (
        optimizer.bytes_of_rounded(largest, 1)
        if elements and optimizer.rounds(largest)
        else (tensors if states is None else states) * largest * master
    )
    return total, min(total, max(ROOM, single))


def _beside_buckets(plan: Plan, trained: int, microbatches: int) -> int:
    """Count gradient elements beside DDP's buckets: all that accumulated without it, else the copied one."""
    if plan.data.technique != "ddp":
        return 0
    if microbatches > 1 and not plan.data.sync_grad_accum:
        return trained
    return max(math.prod(p.shape) for p in plan.parameters if p.trainable)


@dataclass(frozen=True)
class _Block:
    """A block with the stacks of experts inside it, or the root.

    Attributes:
        gathered: bytes of the gathered parameters.
        reduced: (trained elements, those of them that a rank keeps) of each reduction, in the order of backward.
    """

    gathered: int
    reduced: tuple[tuple[int, int], ...]
    frees: bool | int
    gathers_in_backward: bool

    @property
    def trained(self) -> int:
        return sum(trained for trained, _ in self.reduced)

    @property
    def shard(self) -> int:
        return sum(kept for _, kept in self.reduced)


@dataclass(frozen=True)
class _Room:
    """A model or pipeline stage as its backward sees it: the root outside the blocks, and blocks in forward order.

    Attributes:
        behind: trained elements of the root that backward reaches before the blocks.
    """

    root: _Block
    behind: int
    blocks: tuple[_Block, ...]

    @classmethod
    def of(cls, plan: Plan, units: tuple[Unit, ...]) -> _Room:
        together: list[list[Unit]] = []
        for unit in units:
            if unit.name and together and is_within(unit.name, together[-1][0].name):
                together[-1].append(unit)
            elif unit.name:
                together.append([unit])
        root = [unit for unit in units if not unit.name]
        return cls(
            _block(plan, root),
            sum(unit.trainable_behind for unit in root),
            tuple(_block(plan, units) for units in together),
        )


def _block(plan: Plan, units: list[Unit]) -> _Block:
    return _Block(
        gathered=sum(unit.gathered_bytes(plan.precision.compute) for unit in units),
        reduced=tuple(
            (unit.trainable_elements, unit.trainable_elements // _shards(plan, unit)) for unit in reversed(units)
        ),
        frees=units[0].reshard_after_forward if units else False,
        gathers_in_backward=any(unit.gathers_in_backward for unit in units),
    )


def _shards(plan: Plan, unit: Unit) -> int:
    if plan.data.technique == "fully_shard" and unit.experts and plan.experts is not None:
        return plan.experts.shards
    return plan.shares.shards


def _gathered(plan: Plan, rooms: list[_Room]) -> int:
    """Return the most bytes gathered at a time: what stays, the computing block, and the one being prefetched."""
    kept, fetched = 0, 0
    for room in rooms:
        kept += room.root.gathered + sum(block.gathered for block in room.blocks[:-1] if not block.frees)
        kept += sum(block.gathered // block.frees for block in room.blocks if block.frees is not True and block.frees)
        last = room.blocks[-1].gathered if room.blocks else 0
        if plan.pipeline is not None and room.blocks and not room.blocks[-1].frees:
            kept, last = kept + last, 0
        fetched = max(fetched, last, *_side_by_side(plan, room, last))
    return kept + fetched


def _side_by_side(plan: Plan, room: _Room, last: int) -> Iterator[int]:
    """Yield the bytes of blocks that are gathered together, among those freed after use."""
    for this, following in pairwise(room.blocks):
        if this.frees:
            at_end = following is room.blocks[-1]
            beside = last if at_end else following.gathered if following.frees else 0
            # torch prefetches in backward; in forward this library does, on accelerators
            together = this.gathers_in_backward or is_accelerator(plan.device)
            yield this.gathered + beside if together else max(this.gathered, beside)


def _gradients(plan: Plan, rooms: list[_Room], microbatches: int) -> Iterator[int]:
    """Yield the bytes of gradients at the moments that can be the peak."""
    dtypes, syncs = plan.precision, bool(plan.data.sync_grad_accum)
    shard, new = dtype_bytes(dtypes.master), dtype_bytes(dtypes.compute)
    summed = dtype_bytes(dtypes.reduce)  # gradients that accumulate whole do so in the reduction's dtype
    shards = shard * sum(block.shard for room in rooms for block in (room.root, *room.blocks))
    whole = summed * sum(block.trained for room in rooms for block in (room.root, *room.blocks))
    apart = new if dtypes.compute != dtypes.reduce else 0  # else a new gradient is added in place
    if plan.pipeline is not None:
        new_at_once = apart * max(
            room.behind + max((block.trained for block in room.blocks), default=0) for room in rooms
        )
        if syncs and microbatches > 1:
            largest = max(summed * (room.root.trained + sum(block.trained for block in room.blocks)) for room in rooms)
            yield shards + largest + new_at_once
        else:
            yield whole + new_at_once
            yield whole + apart * max(room.root.trained for room in rooms)
        return
    (room,) = rooms
    if microbatches > 1 and not syncs:
        last = max((trained for trained, _ in room.blocks[-1].reduced), default=0) if room.blocks else 0
        yield whole + apart * (last + room.behind)
        yield summed * room.root.trained + apart * room.root.trained + shards - shard * room.root.shard
        return
    done = shards if microbatches > 1 else 0
    # cut sequences do not enter through the first block's arguments
    at_once = 1 if plan.tensor is not None and plan.tensor.sequence_parallel else 0
    for trained, kept in chain.from_iterable(block.reduced for block in reversed(room.blocks[at_once:])):
        yield done + new * (room.behind + trained)
        done += 0 if microbatches > 1 else shard * kept
    yield done + new * (room.root.trained + sum(block.trained for block in room.blocks[:at_once]))
