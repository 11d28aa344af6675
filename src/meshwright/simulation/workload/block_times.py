"""Price one block's forward and backward on one rank: products, attention, memory traffic, messages, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from meshwright.simulation.hardware.links import gather_s

from .architecture import BlockShape, Product
from .execution import Job


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


FORWARD_OPERATORS, BACKWARD_OPERATORS = 26, 44
"""Operators that a block of a decoder dispatches, forward and backward, where chains run as one kernel: assumed."""
EXPERT_OPERATORS, PER_EXPERT = 280, 4
"""Further operators of a mixture's forward: routing, permutations, dispatch; and for each of a rank's experts, since a
grouped product launches a kernel, and in 8 bits casts, for each. The first was chosen on published mixtures."""
CASTING = 2.0
"""Operators in 8 or 4 bits, over those in half precision: each product's operands are cast and scaled."""
UNFUSED = 1.6
"""Operators without fusion, over those with it."""
HALF = 2.0
CAST = {"float8": 1.0, "mxfp8": 1.0, "nvfp4": 0.56}
"""Bytes of an operand's element in the dtypes that half-precision tensors are cast to, scales included."""


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
            back.add(Cost.TENSOR, -messages.get(Cost.TENSOR, 0.0) / 4)
    elif run.recompute == "modules":
        back.add(Cost.TRAFFIC, traffic / 2)
    elif run.recompute in ("core", "selective"):
        back.add(Cost.ATTENTION, core)
        if run.recompute == "selective":
            back.add(Cost.PRODUCTS, _attention_products(block, job))
    _add_host(ahead, block, job, backward=False)
    _add_host(back, block, job, backward=True)
    return BlockTimes(ahead, back, deferred)


def _add_host(seconds: Costs, block: BlockShape, job: Job, *, backward: bool) -> None:
    """Add what the host takes longer to launch than the device to compute."""
    run, device = job.execution, job.machines.device
    forward = _operators(block, job)
    number = forward
    if backward:
        number *= BACKWARD_OPERATORS / FORWARD_OPERATORS
        number += forward if run.recompute == "full" else 0
    host = number * (1.0 if run.fused else UNFUSED) * device.host_operator_s
    seconds.add(Cost.HOST, max(0.0, host - seconds.seconds))


def _operators(block: BlockShape, job: Job) -> float:
    number = FORWARD_OPERATORS
    if block.experts:
        number += EXPERT_OPERATORS + PER_EXPERT * block.experts.number / job.layout.ep
    return number * (CASTING if job.execution.products in CAST else 1.0)


def _cut(product: Product, tp: int) -> tuple[float, float]:
    """Return (depth, columns) of one rank's part of a product."""
    if product.cut == "column":
        return product.depth, product.columns / tp
    if product.cut == "row":
        return product.depth / tp, product.columns
    return product.depth, product.columns


def _products(block: BlockShape, job: Job) -> tuple[float, float, float, float]:
    """Return the seconds of forward products, of weight gradients, of input gradients, and of the weight gradients of
    linear layers alone."""
    forward = weights = inputs = 0.0
    for product in (*block.products, *(block.experts.shared if block.experts else ())):
        depth, columns = _cut(product, job.layout.tp)
        f, w, i = _three(job, job.tokens, depth, columns)
        forward, weights, inputs = forward + f, weights + w, inputs + i
    deferred = weights
    if block.experts:
        tokens, experts = _expert_tokens(block, job)
        for product in block.experts.products:
            f, w, i = _three(job, tokens / experts, product.depth, product.columns)
            scale = experts * (job.execution.imbalance if job.layout.ep > 1 else 1.0)
            forward, weights, inputs = forward + scale * f, weights + scale * w, inputs + scale * i
    return forward, weights * job.execution.trained, inputs, deferred * job.execution.trained


def _attention_products(block: BlockShape, job: Job) -> float:
    """Return the seconds of the forward products of an attention module's linear layers."""
    cuts = (_cut(product, job.layout.tp) for product in block.products if product.attends)
    return sum(_three(job, job.tokens, depth, columns)[0] for depth, columns in cuts)


def _expert_tokens(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return (token copies for this rank's experts, number of its experts)."""
    assert block.experts is not None
    ranks = job.layout.ep
    # a rank of the tensor axis holds its part of the tokens where experts are spread over it
    own = job.tokens / (job.layout.tp if ranks > 1 else 1)
    return own * block.experts.top_k, block.experts.number / ranks


def _three(job: Job, tokens: float, depth: float, columns: float) -> tuple[float, float, float]:
    run, device = job.execution, job.machines.device
    size = CAST.get(run.products, run.compute_bytes)
    forward = device.product_s(tokens, columns, depth, run.products, size)
    weight = device.product_s(depth, columns, tokens, run.products, size)
    weight += device.traffic_s(depth * columns * (run.gradient_bytes + run.reduce_bytes))
    return forward, weight, device.product_s(tokens, depth, columns, run.products, size)


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
    if not run.fused:
        extra = wide * 2 * (2 * b + 4) + cut * block.width * (2 * b)
        forward, backward = forward + extra, backward + extra
    if block.experts:
        copies, _ = _expert_tokens(block, job)
        copies *= run.imbalance
        permuted = copies * block.hidden * b * 2 * 2
        inside = copies * block.experts.width * b
        shared = cut * sum(p.columns for p in block.experts.shared[:1]) * b
        router = job.tokens / layout.tp * block.experts.number * 4 * 6
        forward += permuted + 3 * inside + 2 * shared + router
        backward += permuted * 1.5 + 5 * inside + 3 * shared + router
    if run.products in CAST:
        forward, backward = forward + _casts(block, job), backward + _casts(block, job)
    return device.traffic_s(forward), device.traffic_s(backward)


def _casts(block: BlockShape, job: Job) -> float:
    """Return the bytes of quantising the inputs of products, rowwise and columnwise; weights once a microbatch."""
    read_and_write = job.execution.compute_bytes + 2.0
    inputs = sum(_cut(product, job.layout.tp)[0] for product in block.products) * job.tokens
    weights = sum(product.elements for product in block.products) / job.layout.tp
    if block.experts:
        copies, experts = _expert_tokens(block, job)
        inputs += copies * (block.hidden + block.experts.width)
        weights += block.experts.elements / block.experts.number * experts
    return (inputs + weights / 2) * read_and_write


def _messages(block: BlockShape, job: Job) -> dict[Cost, float]:
    """Return the seconds of a forward's messages that nothing hides; a backward has as many."""
    run, layout, machines = job.execution, job.layout, job.machines
    found: dict[Cost, float] = {}
    moved = job.tokens * block.hidden * run.compute_bytes
    if layout.tp > 1:
        passes = 4 if block.experts is None or block.experts.shared else 2
        seconds = passes * gather_s(moved, job.tensor_group, machines)
        found[Cost.TENSOR] = seconds * (1 - run.hides_tensor)
    if layout.cp > 1 and block.attention:
        core = block.attention
        keys = job.tokens * layout.cp * core.kv_heads * (core.key_dim + core.value_dim) / layout.tp
        seconds = gather_s(keys * run.compute_bytes, job.context_group, machines)
        forward, _ = _attention(block, job)
        found[Cost.CONTEXT] = max(0.0, seconds - 0.8 * forward)
    if layout.ep > 1 and block.experts:
        seconds = 2 * run.imbalance * _dispatch_s(block, job)
        found[Cost.EXPERTS] = seconds * (1 - run.hides_experts)
    return found


def _dispatch_s(block: BlockShape, job: Job) -> float:
    """Return the seconds in which a microbatch's tokens reach their experts.

    A token travels once to each node that has some of its experts, and inside the node once to each rank (DeepEP,
    arXiv 2412.19437, section 3.2.2).
    """
    assert block.experts is not None
    machines, ranks = job.machines, job.layout.ep
    own, _ = _expert_tokens(block, job)
    tokens = own / block.experts.top_k * block.hidden * job.execution.compute_bytes
    inside = job.expert_group.in_node(machines)
    nodes = -(-ranks // inside)
    seconds = tokens * _reached(ranks, block.experts.top_k) * (inside - 1) / inside / machines.inside.speed
    if nodes > 1:
        across = tokens * _reached(nodes, block.experts.top_k) * (nodes - 1) / nodes / machines.across.speed
        seconds = max(seconds, across) + machines.across.latency_s
    return seconds + machines.launch_s + machines.inside.latency_s


def _reached(places: int, copies: int) -> float:
    """Return how many of ``places`` some of a token's ``copies`` go to, if routers choose evenly."""
    return places * (1 - (1 - 1 / places) ** copies)
