"""Price one block's forward and backward on one rank: products, attention, memory traffic, messages, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from meshwright.simulation.hardware.links import gather_s

from .architecture import BlockShape
from .execution import Job
from .host_times import host_seconds, starved_seconds
from .mixture_times import dispatch_seconds, mixture_seconds, mixture_traffic
from .products import attention_products, cast_seconds, rank_part, three_products


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
            scale = job.execution.imbalance if job.layout.ep > 1 else 1.0
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
    casts, casts_back = cast_seconds(block, job)
    return device.traffic_s(forward) + casts, device.traffic_s(backward) + casts_back


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
        seconds = 2 * run.imbalance * dispatch_seconds(block, job)
        found[Cost.EXPERTS] = seconds * (1 - run.hides_experts)
    return found
