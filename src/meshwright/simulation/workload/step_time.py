"""Put a step's time together: blocks, ends of the model, data messages, the pipeline, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.simulation.hardware.links import Group, gather_s, reduce_s, send_s

from .architecture import BlockShape
from .block_times import BlockTimes, Cost, Costs, block_times
from .execution import Job
from .pipeline import StageSeconds, least_pipeline_seconds, pipeline_seconds

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
        hidden_s: seconds of messages over data ranks that run behind the work.
    """

    costs: Costs
    hidden_s: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return self.costs.seconds

    def bound_by(self) -> list[tuple[Cost, float]]:
        """Return the costs and their fraction of the step, largest first."""
        whole = self.seconds or 1.0
        return sorted(((cost, s / whole) for cost, s in self.costs.items() if s > 0), key=lambda pair: -pair[1])


def step_time(job: Job, kinds: Kinds | None = None) -> StepTime:
    """Forecast the seconds of one optimizer step; a pipeline's by simulation of its schedule.

    Args:
        kinds: times of the job's blocks, where they are known from a job that differs in data ranks or stages alone.
    """
    kinds = kinds or Kinds(job)
    if job.layout.pp == 1:
        return _step(job, kinds, None, 0.0)
    stages = stage_seconds(job, kinds)
    computed = pipeline_seconds(job, replace(stages, message=0.0))
    return _step(job, kinds, stages, computed, pipeline_seconds(job, stages) - computed)


def least_step_seconds(job: Job, kinds: Kinds, *, closely: bool = False) -> float:
    """Return a lower bound of ``step_time`` in closed form, which is the step itself without a pipeline.

    Args:
        closely: look at all ranks of a pipeline, not only at the first, the last, and the one that computes longest.
    """
    forward = backward = 0.0
    stages, fullest = None, 0
    if job.layout.pp > 1:
        stages = stage_seconds(job, kinds)
        fullest = _fullest(job, stages)
    counts = job.architecture.part(job.bounds_on(fullest)).counts
    if stages is None or job.execution.zero != 3:
        forward, backward = (costs.seconds for costs in rank_costs(job, kinds, fullest, counts))
    makespan = job.microbatches * (forward + backward)
    if stages is not None:
        makespan = least_pipeline_seconds(job, stages, () if closely else {0, fullest, job.layout.pp - 1})
    exposed, hidden = _data(job, kinds, counts, backward)
    return (makespan + exposed + STOLEN * hidden + optimizer_seconds(job)) * job.execution.straggler


def _step(job: Job, kinds: Kinds, stages: StageSeconds | None, makespan: float, messages: float = 0.0) -> StepTime:
    """Put a step together, given when its pipeline ends, and by how much messages between its stages delay that."""
    fullest = 0 if stages is None else _fullest(job, stages)
    counts = job.architecture.part(job.bounds_on(fullest)).counts
    forward, backward = rank_costs(job, kinds, fullest, counts)
    costs = Costs()
    costs.add_all(forward, job.microbatches)
    costs.add_all(backward, job.microbatches)
    if stages is not None:
        costs.add(Cost.BUBBLE, max(0.0, makespan - costs.seconds))
        costs.add(Cost.PIPELINE, messages)
    exposed, hidden = _data(job, kinds, counts, backward.seconds)
    if exposed or hidden:
        costs.add(Cost.DATA, exposed + STOLEN * hidden)
    costs.add(Cost.OPTIMIZER, optimizer_seconds(job))
    slow = job.execution.straggler
    if slow != 1.0:
        costs = Costs({cost: seconds * slow for cost, seconds in costs.items()})
    return StepTime(costs, hidden * slow)


def _fullest(job: Job, stages: StageSeconds) -> int:
    """Return the pipeline rank that computes longest."""
    busy = [0.0] * job.layout.pp
    for home, forward, backward in zip(job.rank_of, stages.forward, stages.backward, strict=True):
        busy[home] += forward + backward
    return busy.index(max(busy))


class Kinds:
    """The distinct blocks of a job, each priced once.

    Attributes:
        times: seconds of each kind.
        forward, backward, deferred: seconds summed over the blocks before each, so that stages are differences.
    """

    def __init__(self, job: Job):
        model = job.architecture
        self.times = [block_times(block, job) for block in model.kinds[0]]
        self.forward = model.sums([times.forward_s for times in self.times])
        self.backward = model.sums([times.backward_s for times in self.times])
        self.deferred = model.sums([times.deferred for times in self.times])
        self.ends = _ends_costs(job)

    @staticmethod
    def key(job: Job) -> tuple:
        """Return what decides the times, of jobs that differ in layout, microbatch and recomputation."""
        layout = job.layout
        return layout.tp, layout.cp, layout.ep, job.microbatch, job.execution.recompute


def least_time(job: Job, kinds: Kinds) -> float:
    """Return a lower bound of a step's seconds for all jobs with these blocks: their work, perfectly spread."""
    work = kinds.forward[-1] + kinds.backward[-1] + sum(costs.seconds for costs in kinds.ends)
    return job.microbatches * work / job.layout.pp


def stage_seconds(job: Job, kinds: Kinds) -> StageSeconds:
    """Return the seconds of one microbatch on each stage; embedding is on the first, head and loss on the last."""
    bounds = job.stage_bounds
    forward = [kinds.forward[b] - kinds.forward[a] for a, b in bounds]
    backward = [kinds.backward[b] - kinds.backward[a] for a, b in bounds]
    first, first_back, last, last_back = (costs.seconds for costs in kinds.ends)
    forward[0], backward[0] = forward[0] + first, backward[0] + first_back
    forward[-1], backward[-1] = forward[-1] + last, backward[-1] + last_back
    weight = tuple(kinds.deferred[b] - kinds.deferred[a] for a, b in bounds)
    return StageSeconds(tuple(forward), tuple(backward), weight, _send(job))


def rank_costs(job: Job, kinds: Kinds, rank: int, counts: Sequence[int]) -> tuple[Costs, Costs]:
    """Return what a pipeline rank with so many blocks of each kind spends its time on for one microbatch, forward and
    backward."""
    forward, backward = Costs(), Costs()
    for times, count in zip(kinds.times, counts, strict=True):
        forward.add_all(times.forward, count)
        backward.add_all(times.backward, count)
    first, first_back, last, last_back = kinds.ends
    if job.rank_of[0] == rank:
        forward.add_all(first)
        backward.add_all(first_back)
    if job.rank_of[-1] == rank:
        forward.add_all(last)
        backward.add_all(last_back)
    return forward, backward


def _send(job: Job) -> float:
    """Return the seconds for which the next stage waits for activations, or the one before for their gradients."""
    run, layout = job.execution, job.layout
    parts = layout.tp if run.sequence_parallel else 1
    moved = job.tokens * job.architecture.hidden * run.compute_bytes
    return run.exposed_sends * send_s(moved / parts, job.stage_stride, job.machines)


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


def _data(job: Job, kinds: Kinds, counts: Sequence[int], backward_s: float) -> tuple[float, float]:
    """Return the seconds of gathers and reductions over data ranks in a step: exposed, and hidden behind work."""
    if job.data_ranks * job.layout.cp == 1:
        return 0.0, 0.0
    shapes = job.architecture.kinds[0]
    found = [(shape, times, count) for shape, times, count in zip(shapes, kinds.times, counts, strict=True) if count]
    if job.execution.zero != 3:
        return _whole_parameters(job, found, backward_s)
    exposed, hidden = _outside_messages(job), 0.0
    for shape, times, count in found:
        more, behind = _sharded_block(shape, times, job)
        exposed, hidden = exposed + count * more, hidden + count * behind
    return exposed, hidden


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
    job: Job, found: Sequence[tuple[BlockShape, BlockTimes, int]], backward_s: float
) -> tuple[float, float]:
    """Return the seconds of messages about parameters that stay whole in a step: exposed, and hidden."""
    run = job.execution
    gathers, reduces = _whole_messages(job, [(shape, count) for shape, _, count in found])
    times_reduced = job.microbatches if run.reduces_each else 1
    room = backward_s * (1 - 1 / BUCKETS) if run.hides_gradients else 0.0
    exposed = times_reduced * max(reduces / BUCKETS, reduces - room)
    hidden = times_reduced * min(reduces, room)
    room = sum(times.forward_s * count for _, times, count in found) if run.hides_gathers else 0.0
    return exposed + max(gathers / BUCKETS, gathers - room), hidden + min(gathers, room)


def _block_messages(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the seconds in which a block's parameters are gathered, and its gradients reduced."""
    run, layout, machines = job.execution, job.layout, job.machines
    dense = block.dense_elements / layout.tp
    reduced = run.reduce_bytes * run.trained
    gathers = gather_s(dense * run.gathered_element, job.owner_group, machines)
    reduces = gather_s(dense * reduced, job.owner_group, machines)
    if job.replica_group.size > 1:
        reduces += reduce_s(dense * reduced / job.owners, job.replica_group, machines)
    if block.experts:
        own, group = block.experts.elements / layout.ep, job.expert_replicas
        gathers += gather_s(own * run.gathered_element, group, machines)
        reduces += gather_s(own * reduced, group, machines)
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


def optimizer_seconds(job: Job) -> float:
    """Return the seconds of AdamW on a rank's share: gradient, master, moments read; moments, master, copy written."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense = model.dense_elements + model.embedding_elements + model.head_elements
    experts = model.expert_elements
    own = dense / layout.tp / layout.pp / job.owners
    own += experts / layout.pp / layout.ep / job.expert_owners
    moved = run.gradient_bytes * 2 + 2 * (run.master_bytes + run.optimizer_bytes) + run.copy_bytes
    return job.machines.device.traffic_s(own * moved * run.trained)
