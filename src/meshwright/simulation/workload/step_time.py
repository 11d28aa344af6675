"""Put a step's time together: blocks, ends of the model, data messages, the pipeline, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.simulation.hardware.links import Group, gather_s, reduce_s, send_s

from .architecture import BlockShape
from .block_times import BlockTimes, Cost, Costs, block_times, total
from .execution import Job

STOLEN = 0.12
"""Fraction of a message's time by which it lengthens the products that it runs behind: its kernels occupy
multiprocessors and memory (Centauri, ASPLOS 2024, reports 5 to 20 %)."""
BUCKETS = 8
"""Messages into which gradients are cut where a system reduces them behind a backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on, on the slowest path.

    Attributes:
        costs: seconds by cost; their sum is the step.
        forward_s, backward_s: for each stage, seconds of one microbatch.
    """

    costs: Costs
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @cached_property
    def seconds(self) -> float:
        return self.costs.seconds

    def bound_by(self) -> list[tuple[Cost, float]]:
        """Return the costs and their fraction of the step, largest first."""
        whole = self.seconds or 1.0
        return sorted(((cost, s / whole) for cost, s in self.costs.items() if s > 0), key=lambda pair: -pair[1])


def step_time(job: Job) -> StepTime:
    """Forecast the seconds of one optimizer step."""
    kinds: dict[BlockShape, BlockTimes] = {}
    for block in job.architecture.blocks:
        if block not in kinds:
            kinds[block] = block_times(block, job)
    stages = _stages(job)
    times = [_stage(job, kinds, number, blocks, len(stages)) for number, blocks in enumerate(stages)]
    ranks, per_rank = job.layout.pp, job.execution.stages_per_rank
    # a rank of an interleaved pipeline has the stages r, r + ranks, ...
    forward = [total(times[s][0] for s in range(r, ranks * per_rank, ranks)) for r in range(ranks)]
    backward = [total(times[s][1] for s in range(r, ranks * per_rank, ranks)) for r in range(ranks)]
    costs = _pipelined(job, forward, backward, kinds)
    fullest = max(range(ranks), key=lambda r: forward[r].seconds + backward[r].seconds)
    _add_data(
        job, costs, kinds, [b for s in range(fullest, ranks * per_rank, ranks) for b in stages[s]], backward[fullest]
    )
    costs.add(Cost.OPTIMIZER, _optimizer(job))
    if job.execution.straggler != 1.0:
        costs = Costs({cost: seconds * job.execution.straggler for cost, seconds in costs.items()})
    return StepTime(costs, tuple(f.seconds for f in forward), tuple(b.seconds for b in backward))


def _stages(job: Job) -> list[list[BlockShape]]:
    """Cut the blocks into stages, as even as possible."""
    blocks, stages = job.architecture.blocks, job.layout.pp * job.execution.stages_per_rank
    bounds = [round(i * len(blocks) / stages) for i in range(stages + 1)]
    return [list(blocks[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def _stage(
    job: Job, kinds: dict[BlockShape, BlockTimes], number: int, blocks: Sequence[BlockShape], stages: int
) -> tuple[Costs, Costs]:
    forward = total(kinds[block].forward for block in blocks)
    backward = total(kinds[block].backward for block in blocks)
    if number == stages - 1:
        ahead, back = _head(job)
        forward.add_all(ahead)
        backward.add_all(back)
    if number == 0:
        moved = job.tokens * job.architecture.hidden * job.execution.compute_bytes
        forward.add(Cost.TRAFFIC, job.machines.device.traffic_s(2 * moved))
        backward.add(Cost.TRAFFIC, job.machines.device.traffic_s(3 * moved))
    if job.layout.pp > 1:
        seconds = _send(job)
        # a rank sends ahead while it receives back: one message's time for two; behind other microbatches a quarter
        seconds *= 0.25 if job.execution.hides_sends else 0.5
        forward.add(Cost.PIPELINE, seconds)
        backward.add(Cost.PIPELINE, seconds)
    return forward, backward


def _send(job: Job) -> float:
    """Return the seconds in which activations reach the next stage."""
    run, layout = job.execution, job.layout
    parts = layout.tp if run.scatters_sends or run.sequence_parallel else 1
    moved = job.tokens * job.architecture.hidden * run.compute_bytes
    return send_s(moved / parts, job.stage_stride, job.machines)


def _head(job: Job) -> tuple[Costs, Costs]:
    """Return the seconds of head and loss, forward and backward."""
    model, device, tp = job.architecture, job.machines.device, job.layout.tp
    columns = model.vocab / tp
    heads = 1 + model.extra_heads
    one = device.product_s(job.tokens, columns, model.hidden, device.half)
    logits = job.tokens * columns
    # cast to fp32, maximum, exponentials and their sum; in backward the softmax, its difference, its cast
    traffic = heads * device.traffic_s(logits * 14)
    return (
        Costs({Cost.PRODUCTS: heads * one, Cost.TRAFFIC: traffic}),
        Costs({Cost.PRODUCTS: heads * 2 * one, Cost.TRAFFIC: traffic}),
    )


def _pipelined(
    job: Job, forward: Sequence[Costs], backward: Sequence[Costs], kinds: dict[BlockShape, BlockTimes]
) -> Costs:
    """Return the seconds of all microbatches, bubbles included."""
    microbatches, ranks = job.microbatches, job.layout.pp
    each = [f.seconds + b.seconds for f, b in zip(forward, backward, strict=True)]
    fullest = max(range(ranks), key=lambda rank: each[rank])
    costs = Costs()
    costs.add_all(forward[fullest], microbatches)
    costs.add_all(backward[fullest], microbatches)
    if ranks > 1:
        bubble = (sum(each) - each[fullest]) / job.execution.stages_per_rank
        if job.execution.split_backward:
            deferred = sum(kinds[block].deferred for block in job.architecture.blocks) / ranks
            bubble = max(0.0, bubble - (ranks - 1) * deferred)
        costs.add(Cost.BUBBLE, bubble)
        costs.add(Cost.PIPELINE, 2 * (ranks - 1) * _send(job))
    return costs


def _add_data(
    job: Job,
    costs: Costs,
    kinds: dict[BlockShape, BlockTimes],
    blocks: Sequence[BlockShape],
    backward: Costs,
) -> None:
    """Add what gathers and reductions over data ranks lengthen the step by."""
    if job.data_ranks * job.layout.cp == 1:
        return
    if job.execution.zero == 3:
        found = [_sharded_block(block, kinds[block], job) for block in blocks]
        exposed = sum(seconds for seconds, _ in found) + _outside_messages(job)
        hidden = sum(seconds for _, seconds in found)
    else:
        exposed, hidden = _whole_parameters(job, kinds, blocks, backward)
    costs.add(Cost.DATA, exposed + STOLEN * hidden)


def _sharded_block(block: BlockShape, times: BlockTimes, job: Job) -> tuple[float, float]:
    """Return the seconds of a sharded block's messages in a step: exposed, and hidden behind the next blocks' work."""
    run = job.execution
    gathers, reduces = _block_messages(block, job)
    forwards = job.microbatches if run.gathers_each else 1
    backwards = job.microbatches if run.gathers_each else 0
    reduced = job.microbatches if run.reduces_each else 1
    phases = [
        (forwards, gathers, times.forward_s if run.hides_gathers else 0.0),
        (backwards - reduced, gathers, times.backward_s),  # microbatches before the last gather alone
        (reduced, reduces + (gathers if backwards else 0.0), times.backward_s),
    ]
    exposed = sum(count * max(0.0, seconds - room) for count, seconds, room in phases if count > 0)
    return exposed, sum(count * min(seconds, room) for count, seconds, room in phases if count > 0)


def _whole_parameters(
    job: Job, kinds: dict[BlockShape, BlockTimes], blocks: Sequence[BlockShape], backward: Costs
) -> tuple[float, float]:
    """Return the seconds of messages about parameters that stay whole in a step: exposed, and hidden."""
    run = job.execution
    gathers, reduces = _whole_messages(job, blocks)
    times_reduced = job.microbatches if run.reduces_each else 1
    room = backward.seconds * (1 - 1 / BUCKETS) if run.hides_gradients else 0.0
    exposed = times_reduced * max(reduces / BUCKETS, reduces - room)
    hidden = times_reduced * min(reduces, room)
    room = sum(kinds[block].forward_s for block in blocks) if run.hides_gathers else 0.0
    return exposed + max(gathers / BUCKETS, gathers - room), hidden + min(gathers, room)


def _block_messages(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the seconds in which a block's parameters are gathered, and its gradients reduced."""
    run, layout, machines = job.execution, job.layout, job.machines
    dense = block.dense_elements / layout.tp
    gathers = gather_s(dense * run.compute_bytes, job.owner_group, machines)
    reduces = gather_s(dense * run.reduce_bytes, job.owner_group, machines)
    if job.replica_group.size > 1:
        reduces += reduce_s(dense * run.reduce_bytes / job.owners, job.replica_group, machines)
    if block.experts:
        own, group = block.experts.elements / layout.ep, job.expert_replicas
        gathers += gather_s(own * run.compute_bytes, group, machines)
        reduces += gather_s(own * run.reduce_bytes, group, machines)
    return gathers, reduces


def _outside_messages(job: Job) -> float:
    """Return the seconds of messages about embedding and head, which little work hides."""
    run, model = job.execution, job.architecture
    elements = (model.embedding_elements + (0 if model.tied else model.head_elements)) / job.layout.tp
    if job.layout.pp > 1:
        elements /= 2
    return gather_s(elements * run.compute_bytes, job.owner_group, job.machines) + gather_s(
        elements * run.reduce_bytes, job.owner_group, job.machines
    )


def _whole_messages(job: Job, blocks: Sequence[BlockShape]) -> tuple[float, float]:
    """Return the seconds in which a rank's parameters are gathered once, and its gradients reduced once."""
    run, layout, machines = job.execution, job.layout, job.machines
    model = job.architecture
    outside = (
        model.head_elements if layout.pp > 1 else model.embedding_elements + model.head_elements * (not model.tied)
    )
    dense = (sum(block.dense_elements for block in blocks) + outside) / layout.tp * run.trained
    experts = sum(block.experts.elements for block in blocks if block.experts) / layout.ep
    everyone = Group(job.data_ranks * layout.cp, layout.tp)
    if run.zero == 0:
        reduces = reduce_s(dense * run.reduce_bytes, everyone, machines)
        if experts:
            reduces += reduce_s(experts * run.reduce_bytes, job.expert_replicas, machines)
        return 0.0, reduces
    owners, replicas = job.owner_group, job.replica_group
    reduces = gather_s(dense * run.reduce_bytes, owners, machines)
    if replicas.size > 1:
        reduces += reduce_s(dense * run.reduce_bytes / owners.size, replicas, machines)
    gathers = gather_s(dense * run.compute_bytes, owners, machines)
    if experts:
        reduces += gather_s(experts * run.reduce_bytes, job.expert_replicas, machines)
        gathers += gather_s(experts * run.compute_bytes, job.expert_replicas, machines)
    return gathers, reduces


def _optimizer(job: Job) -> float:
    """Return the seconds of AdamW on a rank's share: gradient, master, moments read; moments, master, copy written."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense = sum(block.dense_elements for block in model.blocks) + model.embedding_elements + model.head_elements
    experts = sum(block.experts.elements for block in model.blocks if block.experts)
    own = dense / layout.tp / layout.pp / job.owners
    own += experts / layout.pp / layout.ep / job.expert_owners
    moved = run.gradient_bytes * 2 + 2 * (run.master_bytes + run.optimizer_bytes) + run.copy_bytes
    return job.machines.device.traffic_s(own * moved * run.trained)
