"""Compute the seconds of a step by what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from meshwright.simulation.cards import Group
from meshwright.simulation.job import BlockShape, Job
from meshwright.simulation.pipeline import StageSeconds, least_pipeline_seconds, pipeline_seconds
from meshwright.simulation.products import (
    attention_products,
    cast_seconds,
    dispatch_seconds,
    host_seconds,
    mixture_seconds,
    mixture_traffic,
    rank_part,
    starved_seconds,
    three_products,
)

# --- price one block's forward and backward on one rank


class Cost(StrEnum):
    """A use of a step's seconds."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    TRAFFIC = "memory traffic"
    HOST = "host"
    TENSOR = "tensor messages"
    CONTEXT = "context messages"
    EXPERTS = "expert messages"
    DATA = "data messages"
    PIPELINE = "pipeline messages"
    BUBBLE = "pipeline bubble"
    OPTIMIZER = "optimizer"
    REHEARSED = "rehearsed work"


class Costs(dict[Cost, float]):
    """Seconds by what they are spent on."""

    def add(self, cost: Cost, seconds: float) -> None:
        self[cost] = self.get(cost, 0.0) + seconds

    def add_all(self, others: Mapping[Cost, float], times: float = 1.0) -> None:
        for cost, seconds in others.items():
            self.add(cost, times * seconds)

    @property
    def seconds(self) -> float:
        return sum(self.values())


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block and microbatch by what they are spent on; messages are those that nothing hides.

    Attributes:
        backward: with the recomputation.
        deferred: part of the backward that gives weights of linear layers their gradients, and that a schedule may put
            off; those of stacked experts are not put off.
    """

    forward: Costs = field(default_factory=Costs)
    backward: Costs = field(default_factory=Costs)
    deferred: float = 0.0

    @cached_property
    def forward_s(self) -> float:
        return self.forward.seconds

    @cached_property
    def backward_s(self) -> float:
        return self.backward.seconds


HALF = 2.0
WITHOUT_TENSOR_CORES = 2.0
"""Seconds of batched products whose heads 8 does not divide, over those of single products with such dims: libraries of
2022 had no tensor core for them, and the other units have a fourth of its speed (78 of 312 TFLOP/s on an A100)."""

ROTARY = 10, 15
"""Reads and writes of queries and keys, forward and backward, beyond those of one kernel, where rotary positions are
applied by operators of their own: two products, a negation, a sum, two concatenations, and slices' backwards, which
fill whole tensors (NVIDIA/Megatron-LM, megatron/core/models/common/embeddings/rope_utils.py,
``_apply_rotary_pos_emb_bshd``)."""

UNPACKING = 12.7, 0.6
"""Bytes read and written for each weight in 4 bits, beside the weight that is written: by the operators of
distributed/nf4.py (codes as int32, two float32 values of a table, their product with the scale), and in one kernel."""


def block_times(block: BlockShape, job: Job) -> BlockTimes:
    """Return the seconds of a block for one microbatch."""
    run, layout = job.execution, job.layout
    forward, weights, inputs, deferred = _products(block, job)
    core, core_back = _attention(block, job)
    traffic, traffic_back = _traffic(block, job)
    messages = _messages(block, job)
    ahead = Costs({Cost.PRODUCTS: forward, Cost.ATTENTION: core, Cost.TRAFFIC: traffic})
    back = Costs({Cost.PRODUCTS: weights + inputs, Cost.ATTENTION: core_back, Cost.TRAFFIC: traffic_back})
    ahead.add_all(messages)
    back.add_all(messages)
    if run.recompute == "full":
        back.add_all(ahead, run.recomputed)
        if layout.tp > 1:  # the last message of the recomputed forward has no reader
            back.add(Cost.TENSOR, -messages.get(Cost.TENSOR, 0.0) / run.tensor_passes)
        if run.stops_early and block.experts is None:
            last = three_products(job, job.tokens, *rank_part(block.products[-1], layout.tp))[0]
            back.add(Cost.PRODUCTS, -run.recomputed * last)
    elif run.recompute == "latents":
        back.add(Cost.PRODUCTS, attention_products(block, job, from_latents=True))
    elif run.recompute in ("core", "selective"):
        back.add(Cost.ATTENTION, core)
        if run.recompute == "selective":
            back.add(Cost.PRODUCTS, attention_products(block, job))
    host, host_back = host_seconds(block, job)
    waits = block.experts is not None and layout.ep > 1 and run.mixture.waits
    mixture = mixture_seconds(block, job, messages.get(Cost.EXPERTS, 0.0)) if waits else 0.0
    ahead.add(Cost.HOST, starved_seconds(host, mixture, ahead.seconds - mixture))
    back.add(Cost.HOST, max(0.0, host_back - back.seconds))
    return BlockTimes(ahead, back, deferred)


def _products(block: BlockShape, job: Job) -> tuple[float, float, float, float]:
    """Return the seconds of forward products, of weight gradients, of input gradients, and of the weight gradients of
    linear layers alone."""
    forward = weights = inputs = 0.0
    for product in (*block.products, *(block.experts.shared if block.experts else ())):
        f, w, i = three_products(job, job.tokens, *rank_part(product, job.layout.tp))
        forward, weights, inputs = forward + f, weights + w, inputs + i
    deferred = weights
    if block.experts:
        copies, experts = job.expert_copies(block), block.experts.number / job.layout.ep
        for product in block.experts.products:
            f, w, i = three_products(job, copies / experts, product.depth, product.columns, experts)
            scale = job.execution.imbalance if job.layout.ep > 1 or job.execution.mixture.pads else 1.0
            forward, weights, inputs = forward + scale * f, weights + scale * w, inputs + scale * i
    return forward, weights * job.execution.trained, inputs, deferred * job.execution.trained


def _attention(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the seconds of attention's core, forward and backward."""
    core, run, device = block.attention, job.execution, job.machines.device
    if core is None:
        return 0.0, 0.0
    shared = job.layout.tp * job.layout.cp
    flops = core.flops(job.microbatch, job.seq_len) / shared
    if run.attention != "unfused":
        forward = device.attention_s(flops, run.attention, backward=False, head_dim=core.key_dim)
        return forward, device.attention_s(2.5 * flops, run.attention, backward=True, head_dim=core.key_dim)
    heads, rows = core.heads / job.layout.tp, job.seq_len / job.layout.cp
    scores = job.microbatch * heads * rows * job.seq_len
    products = 2 * job.microbatch * heads
    one = device.product_s(rows, job.seq_len, core.key_dim, device.half)
    other = device.product_s(rows, core.value_dim, job.seq_len, device.half)
    small = products / 2 * (one + other - 2 * device.kernel_s)
    if core.key_dim % 8:
        small *= WITHOUT_TENSOR_CORES
    # scale, mask and softmax in one kernel (read, write), dropout (read, write, mask), two products (write, read)
    moved = scores * ((2 * HALF) + (2 * HALF + 1 if block.dropout else 0))
    return small + device.traffic_s(moved), 2 * small + device.traffic_s(1.5 * moved)


def _traffic(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the seconds of norms, residuals, activations, casts and permutations, forward and backward."""
    run, device, layout = job.execution, job.machines.device, job.layout
    wide = job.tokens * block.hidden / (layout.tp if run.sequence_parallel else 1)
    core, b = block.attention, run.compute_bytes
    heads = (core.heads * core.key_dim + core.kv_heads * core.key_dim) if core else 0
    cut = job.tokens / layout.tp
    residual = wide * (3 * b + (b / 2 if block.dropout else 0)) * 2
    norms = wide * 2 * b * 2
    rotary = cut * heads * 2 * b if not block.dropout and block.gated else cut * heads * b
    width = cut * block.width * (3 if block.gated else 2) * b
    forward = residual + norms + rotary + width
    backward = wide * 2 * (3 * b) + wide * 2 * (3 * b) + rotary + cut * block.width * (5 if block.gated else 3) * b
    if not run.fused_rotary:
        forward, backward = (moved + n * cut * heads * b for moved, n in zip((forward, backward), ROTARY, strict=True))
    if not run.fused:
        extra = wide * 2 * (2 * b + 4) + cut * block.width * (2 * b)
        forward, backward = forward + extra, backward + extra
    if run.recompute == "modules":
        backward += norms + width
    if block.experts:
        more, more_back = mixture_traffic(block, job)
        forward, backward = forward + more, backward + more_back
    unpacked = run.unpacked * block.dense_elements / layout.tp * (UNPACKING[run.fused] + b)
    forward, backward = forward + unpacked, backward + unpacked
    casts, casts_back = cast_seconds(block, job)
    return device.traffic_s(forward) + casts, device.traffic_s(backward) + casts_back


def _messages(block: BlockShape, job: Job) -> dict[Cost, float]:
    """Return the seconds of a forward's messages that nothing hides; a backward has as many."""
    run, layout, machines = job.execution, job.layout, job.machines
    found: dict[Cost, float] = {}
    moved = job.tokens * block.hidden * run.compute_bytes
    if layout.tp > 1:
        passes = run.tensor_passes if block.experts is None or block.experts.shared else 2
        seconds = passes * machines.gather_s(moved, job.tensor_group)
        found[Cost.TENSOR] = seconds * (1 - run.hides_tensor)
    if layout.cp > 1 and block.attention:
        core = block.attention
        keys = job.tokens * layout.cp * core.kv_heads * (core.key_dim + core.value_dim) / layout.tp
        seconds = machines.gather_s(keys * run.compute_bytes, Group(layout.cp, layout.tp))
        forward, _ = _attention(block, job)
        found[Cost.CONTEXT] = max(0.0, seconds - 0.8 * forward)
    if layout.ep > 1 and block.experts:
        seconds = 2 * run.imbalance * dispatch_seconds(block, job)
        found[Cost.EXPERTS] = seconds * (1 - run.hides_experts)
    return found


# --- put a step's time together

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
    if stages is None or job.execution.zero != 3:
        forward, backward = (costs.seconds for costs in rank_costs(job, kinds, fullest))
    makespan = job.turns * (forward + backward)
    if stages is not None:
        makespan = least_pipeline_seconds(job, stages, () if closely else {0, fullest, job.layout.pp - 1})
    exposed, hidden = _data(job, kinds, fullest, backward)
    return (makespan + exposed + STOLEN * hidden + optimizer_seconds(job)) * job.execution.straggler


def _step(job: Job, kinds: Kinds, stages: StageSeconds | None, makespan: float, messages: float = 0.0) -> StepTime:
    """Put a step together, given when its pipeline ends, and by how much messages between its stages delay that."""
    fullest = 0 if stages is None else _fullest(job, stages)
    forward, backward = rank_costs(job, kinds, fullest)
    costs = Costs()
    turns = job.turns if stages is None else job.microbatches
    costs.add_all(forward, turns)
    costs.add_all(backward, turns)
    if stages is not None:
        costs.add(Cost.BUBBLE, max(0.0, makespan - costs.seconds))
        costs.add(Cost.PIPELINE, messages)
    exposed, hidden = _data(job, kinds, fullest, backward.seconds)
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
        ends: seconds of the embedding, forward and backward, and of head and loss, forward and backward.
    """

    def __init__(self, job: Job):
        model = job.architecture
        self.times = [block_times(block, job) for block in model.kinds[0]]
        self.forward = model.sums([times.forward_s for times in self.times])
        self.backward = model.sums([times.backward_s for times in self.times])
        self.deferred = model.sums([times.deferred for times in self.times])
        device, columns, heads = job.machines.device, model.vocab / job.layout.tp, 1 + model.extra_heads
        moved = job.tokens * model.hidden * job.execution.compute_bytes
        one = device.product_s(job.tokens, columns, model.hidden, device.half)
        # cast to fp32, maximum, exponentials and their sum; in backward the softmax, its difference, its cast
        traffic, logits = heads * device.traffic_s(job.tokens * columns * 14), job.tokens * model.vocab
        loss = Costs({Cost.PRODUCTS: heads * one, Cost.TRAFFIC: traffic})
        if job.execution.gathers_logits and job.layout.tp > 1:
            traffic = loss[Cost.TRAFFIC] = traffic * job.layout.tp
            loss.add(Cost.TENSOR, heads * job.machines.gather_s(logits * job.execution.compute_bytes, job.tensor_group))
        self.ends = (
            Costs({Cost.TRAFFIC: device.traffic_s(2 * moved)}),
            Costs({Cost.TRAFFIC: device.traffic_s(3 * moved)}),
            loss,
            Costs({Cost.PRODUCTS: heads * 2 * one, Cost.TRAFFIC: traffic}),
        )

    @staticmethod
    def key(job: Job) -> tuple:
        """Return what decides the times, of jobs that differ in layout, microbatch and recomputation."""
        layout = job.layout
        return layout.tp, layout.cp, layout.ep, job.microbatch, job.execution.recompute


def least_time(job: Job, kinds: Kinds) -> float:
    """Return a lower bound of a step's seconds for all jobs with these blocks: their work, perfectly spread."""
    work = kinds.forward[-1] + kinds.backward[-1] + sum(costs.seconds for costs in kinds.ends)
    return job.turns * work / job.layout.pp


def stage_seconds(job: Job, kinds: Kinds) -> StageSeconds:
    """Return the seconds of one microbatch on each stage; embedding is on the first, head and loss on the last."""
    bounds = job.stage_bounds
    forward = [kinds.forward[b] - kinds.forward[a] for a, b in bounds]
    backward = [kinds.backward[b] - kinds.backward[a] for a, b in bounds]
    first, first_back, last, last_back = (costs.seconds for costs in kinds.ends)
    forward[0], backward[0] = forward[0] + first, backward[0] + first_back
    forward[-1], backward[-1] = forward[-1] + last, backward[-1] + last_back
    weight = tuple(kinds.deferred[b] - kinds.deferred[a] for a, b in bounds)
    run = job.execution
    # the next stage waits for activations, or the one before for their gradients
    moved = job.tokens * job.architecture.hidden * run.compute_bytes / (job.layout.tp if run.sequence_parallel else 1)
    message = run.exposed_sends * job.machines.send_s(moved, job.layout.tp * job.layout.cp * job.data_ranks)
    return StageSeconds(tuple(forward), tuple(backward), weight, message)


def rank_costs(job: Job, kinds: Kinds, rank: int) -> tuple[Costs, Costs]:
    """Return what a pipeline rank spends its time on for one microbatch, forward and backward."""
    forward, backward = Costs(), Costs()
    for times, count in zip(kinds.times, job.architecture.part(job.bounds_on(rank)).counts, strict=True):
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


def _data(job: Job, kinds: Kinds, rank: int, backward_s: float) -> tuple[float, float]:
    """Return the seconds of gathers and reductions over data ranks in a step: exposed, and hidden behind work."""
    run, layout, machines, model = job.execution, job.layout, job.machines, job.architecture
    if job.data_ranks * layout.cp == 1:
        return 0.0, 0.0
    shapes, counts = model.kinds[0], model.part(job.bounds_on(rank)).counts
    found = [(shape, times, count) for shape, times, count in zip(shapes, kinds.times, counts, strict=True) if count]
    if run.zero != 3:
        return _whole_parameters(job, found, backward_s)
    # embedding and head, whose messages little work hides
    elements = (model.embedding_elements + (0 if model.tied else model.head_elements)) / layout.tp
    elements /= 2 if layout.pp > 1 else 1
    exposed = sum(machines.gather_s(elements * size, job.owner_group) for size in (run.compute_bytes, run.reduce_bytes))
    hidden, reduced = 0.0, run.reduce_bytes * run.trained
    forwards = job.microbatches if run.gathers_each else 1
    backwards = job.microbatches if run.gathers_each else 0
    reductions = job.microbatches if run.reduces_each else 1
    sums = 1 if run.sums_replicas_once else reductions
    for block, times, number in found:  # messages of a sharded block run behind the next blocks' work
        together = job.joined(block)
        dense = block.dense_elements / layout.tp * together
        gathers = machines.gather_s(dense * run.gathered_element, job.owner_group)
        reduces = machines.gather_s(dense * reduced, job.owner_group)
        again = machines.gather_s(dense * run.gathered_element, Group(run.reshards_to or job.owners, layout.tp))
        replicas = 0.0
        if job.replica_group.size > 1:
            replicas = machines.reduce_s(dense * reduced / job.owners, job.replica_group)
        if block.experts:
            own = block.experts.elements / layout.ep * together * job.expert_shares[1]
            experts = machines.gather_s(own * run.gathered_element, job.expert_replicas)
            gathers, again = gathers + experts, again + experts
            reduces += machines.gather_s(own * reduced, job.expert_replicas)
        reduces += again if backwards else 0.0
        phases = [
            (forwards, gathers, times.forward_s if run.hides_gathers else 0.0),
            (backwards - reductions, again, times.backward_s),  # microbatches before the last gather alone
            (reductions - sums, reduces, times.backward_s),
            (sums, reduces + replicas, times.backward_s),
        ]
        phases = [(count / together, seconds, room * together) for count, seconds, room in phases if count > 0]
        exposed += number * sum(count * max(0.0, seconds - room) for count, seconds, room in phases)
        hidden += number * sum(count * min(seconds, room) for count, seconds, room in phases)
    return exposed, hidden


def _whole_parameters(
    job: Job, found: Sequence[tuple[BlockShape, BlockTimes, int]], backward_s: float
) -> tuple[float, float]:
    """Return the seconds of messages about parameters that stay whole in a step: exposed, and hidden."""
    run, layout, machines, model = job.execution, job.layout, job.machines, job.architecture
    outside = (
        model.head_elements if layout.pp > 1 else model.embedding_elements + model.head_elements * (not model.tied)
    )
    dense = (sum(block.dense_elements * count for block, _, count in found) + outside) / layout.tp * run.trained
    experts = sum(block.experts.elements * count for block, _, count in found if block.experts) / layout.ep
    gathers, price = 0.0, machines.reduce_s if run.zero == 0 else machines.gather_s
    owners = Group(job.data_ranks * layout.cp, layout.tp) if run.zero == 0 else job.owner_group
    reduces = price(dense * run.reduce_bytes, owners)
    if run.zero and job.replica_group.size > 1:
        reduces += machines.reduce_s(dense * run.reduce_bytes / owners.size, job.replica_group)
    if experts:
        reduces += price(experts * run.reduce_bytes, job.expert_replicas)
    if run.zero:
        gathers = machines.gather_s(dense * run.compute_bytes, owners)
        if experts:
            gathers += machines.gather_s(experts * run.compute_bytes, job.expert_replicas)
    times_reduced = job.microbatches if run.reduces_each else 1
    room = backward_s * (1 - 1 / BUCKETS) if run.hides_gradients else 0.0
    exposed = times_reduced * max(reduces / BUCKETS, reduces - room)
    hidden = times_reduced * min(reduces, room)
    room = sum(times.forward_s * count for _, times, count in found) if run.hides_gathers else 0.0
    return exposed + max(gathers / BUCKETS, gathers - room), hidden + min(gathers, room)


def optimizer_seconds(job: Job) -> float:
    """Return the seconds of AdamW on a rank's share: gradient, master, moments read; moments, master, copy written."""
    run, layout, model = job.execution, job.layout, job.architecture
    dense = model.dense_elements + model.embedding_elements + model.head_elements
    experts = model.expert_elements
    own = dense / layout.tp / layout.pp / job.owners
    own += experts / layout.pp / layout.ep / job.expert_shares[0]
    moved = run.gradient_bytes * 2 + 2 * (run.master_bytes + run.optimizer_bytes) + run.copy_bytes
    return job.machines.device.traffic_s(own * moved * run.trained)
