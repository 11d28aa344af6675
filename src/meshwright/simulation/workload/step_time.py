"""Put a step's time together: blocks, ends of the model, data messages, the pipeline, the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshwright.simulation.hardware.links import Group, gather_s, reduce_s, send_s

from .architecture import BlockShape
from .block_times import BlockTimes, Cost, Costs, block_times
from .execution import Job

STOLEN = 0.12
"""Fraction of a message's time by which it lengthens the products that it runs behind, since its kernels occupy
multiprocessors and memory: assumed, not measured."""
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


def step_time(job: Job, kinds: Kinds | None = None) -> StepTime:
    """Forecast the seconds of one optimizer step.

    Args:
        kinds: times of the job's blocks, where they are known from a job that differs in data ranks or stages alone.
    """
    kinds = kinds or Kinds(job)
    ahead, back = _by_rank(job, kinds)
    fullest = max(range(job.layout.pp), key=lambda rank: ahead[rank] + back[rank])
    blocks = job.blocks_of(fullest)
    forward, backward = _rank_costs(job, kinds, fullest, blocks)
    costs = Costs()
    costs.add_all(forward, job.microbatches)
    costs.add_all(backward, job.microbatches)
    if job.layout.pp > 1:
        _add_bubble(job, costs, kinds, sum(ahead) + sum(back) - ahead[fullest] - back[fullest])
    _add_data(job, costs, kinds, Counter(map(id, blocks)), backward)
    costs.add(Cost.OPTIMIZER, _optimizer(job))
    if job.execution.straggler != 1.0:
        costs = Costs({cost: seconds * job.execution.straggler for cost, seconds in costs.items()})
    return StepTime(costs, tuple(ahead), tuple(back))


class Kinds:
    """The distinct blocks of a job by their identity, each priced once.

    Args:
        priced: times of blocks that are known already, by (identity, what decides them); new ones are added.
    """

    def __init__(self, job: Job, priced: dict[tuple, BlockTimes] | None = None):
        priced = {} if priced is None else priced
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, job.microbatch, job.execution.recompute)
        self.shapes = {id(block): block for block in job.architecture.blocks}
        self.times: dict[int, BlockTimes] = {}
        for kind, block in self.shapes.items():
            if (kind, *key) not in priced:
                priced[kind, *key] = block_times(block, job)
            self.times[kind] = priced[kind, *key]
        order = [self.times[id(block)] for block in job.architecture.blocks]
        self.forward_before = [0.0, *accumulate(times.forward_s for times in order)]
        self.backward_before = [0.0, *accumulate(times.backward_s for times in order)]

    def of(self, blocks: Iterable[BlockShape]) -> Iterable[tuple[BlockTimes, int]]:
        """Return the times of each kind among ``blocks``, and how many there are."""
        return [(self.times[key], count) for key, count in Counter(map(id, blocks)).items()]


def least_time(job: Job, kinds: Kinds) -> float:
    """Return a lower bound of a step's seconds for all jobs with these blocks: their work, perfectly spread."""
    ends = _ends_costs(job)
    work = kinds.forward_before[-1] + kinds.backward_before[-1] + sum(costs.seconds for costs in ends)
    return job.microbatches * work / job.layout.pp


def _by_rank(job: Job, kinds: Kinds) -> tuple[list[float], list[float]]:
    """Return for each pipeline rank the seconds of one microbatch's forward, and of its backward."""
    ranks, before, behind = job.layout.pp, kinds.forward_before, kinds.backward_before
    forward, backward = [0.0] * ranks, [0.0] * ranks
    for stage, (a, b) in enumerate(job.stage_bounds):
        forward[stage % ranks] += before[b] - before[a]
        backward[stage % ranks] += behind[b] - behind[a]
    first, first_back, last, last_back = (costs.seconds for costs in _ends_costs(job))
    sent = _sent(job) * job.execution.stages_per_rank
    forward, backward = [s + sent for s in forward], [s + sent for s in backward]
    forward[0], backward[0] = forward[0] + first, backward[0] + first_back
    forward[-1], backward[-1] = forward[-1] + last, backward[-1] + last_back
    return forward, backward


def _rank_costs(job: Job, kinds: Kinds, rank: int, blocks: Sequence[BlockShape]) -> tuple[Costs, Costs]:
    """Return what one pipeline rank spends its time on for one microbatch, forward and backward."""
    forward, backward = Costs(), Costs()
    for times, count in kinds.of(blocks):
        forward.add_all(times.forward, count)
        backward.add_all(times.backward, count)
    first, first_back, last, last_back = _ends_costs(job)
    if rank == 0:
        forward.add_all(first)
        backward.add_all(first_back)
    if rank == job.layout.pp - 1:
        forward.add_all(last)
        backward.add_all(last_back)
    sent = _sent(job) * job.execution.stages_per_rank
    for costs in (forward, backward):
        costs.add(Cost.PIPELINE, sent)
    return forward, backward


def _sent(job: Job) -> float:
    """Return the seconds by which a stage's messages lengthen each microbatch, forward or backward.

    A rank sends ahead while it receives back: one message's time for two; behind other microbatches a quarter.
    """
    return 0.0 if job.layout.pp == 1 else _send(job) * (0.25 if job.execution.hides_sends else 0.5)


def _send(job: Job) -> float:
    """Return the seconds in which activations reach the next stage."""
    run, layout = job.execution, job.layout
    parts = layout.tp if run.sequence_parallel else 1
    moved = job.tokens * job.architecture.hidden * run.compute_bytes
    return send_s(moved / parts, job.stage_stride, job.machines)


def _ends_costs(job: Job) -> tuple[Costs, Costs, Costs, Costs]:
    """Return the seconds of the embedding, forward and backward, and of head and loss, forward and backward."""
    model, device, tp = job.architecture, job.machines.device, job.layout.tp
    moved = job.tokens * model.hidden * job.execution.compute_bytes
    columns, heads = model.vocab / tp, 1 + model.extra_heads
    one = device.product_s(job.tokens, columns, model.hidden, device.half)
    # cast to fp32, maximum, exponentials and their sum; in backward the softmax, its difference, its cast
    traffic = heads * device.traffic_s(job.tokens * columns * 14)
    return (
        Costs({Cost.TRAFFIC: device.traffic_s(2 * moved)}),
        Costs({Cost.TRAFFIC: device.traffic_s(3 * moved)}),
        Costs({Cost.PRODUCTS: heads * one, Cost.TRAFFIC: traffic}),
        Costs({Cost.PRODUCTS: heads * 2 * one, Cost.TRAFFIC: traffic}),
    )


def _add_bubble(job: Job, costs: Costs, kinds: Kinds, others: float) -> None:
    """Add the wait of the fullest rank: one microbatch of all ``others``, divided among its stages."""
    ranks = job.layout.pp
    bubble = others / job.execution.stages_per_rank
    if job.execution.split_backward:
        deferred = sum(times.deferred * count for times, count in kinds.of(job.architecture.blocks)) / ranks
        bubble = max(0.0, bubble - (ranks - 1) * deferred)
    costs.add(Cost.BUBBLE, bubble)
    costs.add(Cost.PIPELINE, 2 * (ranks - 1) * _send(job))


def _add_data(
    job: Job,
    costs: Costs,
    kinds: Kinds,
    blocks: Counter[int],
    backward: Costs,
) -> None:
    """Add what gathers and reductions over data ranks lengthen the step by."""
    if job.data_ranks * job.layout.cp == 1:
        return
    if job.execution.zero == 3:
        found = [(_sharded_block(kinds.shapes[key], kinds.times[key], job), count) for key, count in blocks.items()]
        exposed = sum(count * seconds for (seconds, _), count in found) + _outside_messages(job)
        hidden = sum(count * seconds for (_, seconds), count in found)
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


def _whole_parameters(job: Job, kinds: Kinds, blocks: Counter[int], backward: Costs) -> tuple[float, float]:
    """Return the seconds of messages about parameters that stay whole in a step: exposed, and hidden."""
    run = job.execution
    gathers, reduces = _whole_messages(job, [(kinds.shapes[key], count) for key, count in blocks.items()])
    times_reduced = job.microbatches if run.reduces_each else 1
    room = backward.seconds * (1 - 1 / BUCKETS) if run.hides_gradients else 0.0
    exposed = times_reduced * max(reduces / BUCKETS, reduces - room)
    hidden = times_reduced * min(reduces, room)
    room = sum(kinds.times[key].forward_s * count for key, count in blocks.items()) if run.hides_gathers else 0.0
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


def _whole_messages(job: Job, blocks: Sequence[tuple[BlockShape, int]]) -> tuple[float, float]:
    """Return the seconds in which a rank's parameters are gathered once, and its gradients reduced once."""
    run, layout, machines = job.execution, job.layout, job.machines
    model = job.architecture
    outside = (
        model.head_elements if layout.pp > 1 else model.embedding_elements + model.head_elements * (not model.tied)
    )
    dense = (sum(block.dense_elements * count for block, count in blocks) + outside) / layout.tp * run.trained
    experts = sum(block.experts.elements * count for block, count in blocks if block.experts) / layout.ep
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
    dense = model.dense_elements + model.embedding_elements + model.head_elements
    experts = model.expert_elements
    own = dense / layout.tp / layout.pp / job.owners
    own += experts / layout.pp / layout.ep / job.expert_owners
    moved = run.gradient_bytes * 2 + 2 * (run.master_bytes + run.optimizer_bytes) + run.copy_bytes
    return job.machines.device.traffic_s(own * moved * run.trained)
