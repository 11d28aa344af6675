"""Price what a mixture of experts adds to a block: messages that carry tokens to experts, and the rows they reorder."""

from __future__ import annotations

from .architecture import BlockShape
from .execution import Job
from .products import CAST, three_products

CALLED = 0.75
"""Bandwidth of a dispatch of tokens as a training loop calls it, over that of its kernel alone: 0.71 to 0.79 for rows
in half precision (deepseek-ai/DeepEP, branch hybrid-ep, Hybrid-EP_Implementation.md: GB200 with 32 multiprocessors)."""
MANY_PEERS, SCATTERED = 8, 0.4
"""Ranks of one NVLink domain beyond which an all-to-all of copies is slower, and its bandwidth over that of other large
collectives: on 32 GB200 it was no faster than a dispatcher that reached 400 and 190 GB/s of 900
(NVIDIA/Megatron-LM, docs/discussions/deepseek-v3-gb200-optimization, section 2.2.1)."""
BIASES = 28, 40
"""Bytes moved for each element of a mixture's output, forward and backward, where kernels of their own weight experts'
biases and add them in fp32 (NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py, ``_apply_bias``)."""

CLAMPS = 8, 10
"""Reads and writes of a gate's output, forward and backward, where both halves are clamped and joined again before it:
two clamps and a concatenation (NVIDIA/Megatron-LM, megatron/core/fusions/fused_bias_geglu.py,
``weighted_bias_quick_geglu_impl``); backward the clamps read gradients and inputs, and the halves are joined again."""


def reached(places: int, copies: int) -> float:
    """Return how many of ``places`` some of a token's ``copies`` go to, if routers choose evenly."""
    return places * (1 - (1 - 1 / places) ** copies)


def dispatch_seconds(block: BlockShape, job: Job) -> float:
    """Return the seconds in which a microbatch's tokens reach their experts.

    Each of a token's copies travels for itself (arXiv 2006.16668); or the token travels once to each node that has some
    of its experts, and inside the node once to each rank (DeepEP, arXiv 2412.19437, section 3.2.2).
    """
    assert block.experts is not None
    machines, ranks, top_k = job.machines, job.layout.ep, block.experts.top_k
    tokens = job.expert_copies(block) / top_k * block.hidden * job.execution.compute_bytes
    inside = job.expert_group.in_node(machines)
    nodes = -(-ranks // inside)
    if job.execution.mixture.dispatch == "copies":
        called = SCATTERED if inside > MANY_PEERS else 1.0
        to_ranks, to_nodes = top_k * (inside - 1) / ranks, top_k * (nodes - 1) / nodes
    else:
        called, to_ranks = CALLED, reached(ranks, top_k) * (inside - 1) / inside
        to_nodes = reached(nodes, top_k) * (nodes - 1) / nodes
    seconds = tokens * to_ranks / machines.inside.speed / called
    if nodes > 1:
        across = tokens * to_nodes / machines.across.speed
        seconds = max(seconds, across) + machines.across.latency_s
    return seconds + machines.launch_s + machines.inside.latency_s


def mixture_traffic(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the bytes that a mixture moves in memory beside its products, forward and backward."""
    assert block.experts is not None
    run, b, experts = job.execution, job.execution.compute_bytes, block.experts
    copies, own = job.expert_copies(block) * run.imbalance, job.tokens / job.layout.tp
    ordered = ordered_bytes(block, job)
    inside = copies * experts.width * b
    shared = own * sum(product.columns for product in experts.shared[:1]) * b
    router = own * experts.number * 4 * 6
    forward = ordered + 3 * inside + 2 * shared + router
    backward = ordered + 5 * inside + 3 * shared + router
    if not run.mixture.weighs_inside:  # the weights' gradients read what the experts returned
        backward += copies * block.hidden * b
    clamps, clamps_back = (n * inside for n in CLAMPS) if experts.clamped and not run.mixture.grouped else (0.0, 0.0)
    forward, backward = forward + clamps, backward + clamps_back
    if run.recompute == "modules":
        backward += 3 * inside + 2 * shared + clamps
    if run.mixture.stashes:
        entering = CAST.get(run.products, b)
        stashed = 2 * copies * (block.hidden * entering + experts.width * (2 * b + entering))
        forward, backward = forward + stashed, backward + stashed
    if experts.biased and not run.mixture.grouped:
        forward, backward = forward + BIASES[0] * copies * block.hidden, backward + BIASES[1] * copies * block.hidden
    return forward, backward


def ordered_bytes(block: BlockShape, job: Job) -> float:
    """Return the bytes moved to order a microbatch's rows by expert and back, which a backward moves once more.

    Copies that travel for themselves are gathered by rank, sorted by expert on arrival, and padded to the rows that
    products in 8 bits take: each a read and a write, and each undone. A dispatcher that sends tokens writes them by
    expert at once (NVIDIA/Megatron-LM, megatron/core/transformer/moe: token_dispatcher.py, experts.py, fused_a2a.py).
    """
    assert block.experts is not None
    run, top_k = job.execution, block.experts.top_k
    copies = job.expert_copies(block) * run.imbalance
    own, row = copies / top_k, block.hidden * run.compute_bytes
    if run.mixture.dispatch == "tokens" or job.layout.ep == 1:
        return 2 * row * (own * reached(job.layout.ep, top_k) + copies)
    times = (2 if block.experts.number > job.layout.ep else 0) + (2 if run.products in CAST else 0)
    return 2 * row * (own + copies + times * copies)


def mixture_seconds(block: BlockShape, job: Job, messages: float) -> float:
    """Return the device's seconds for a mixture's experts forward, with those of their messages."""
    assert block.experts is not None
    copies, experts = job.expert_copies(block), block.experts.number / job.layout.ep
    routed = (
        three_products(job, copies / experts, product.depth, product.columns, experts)[0]
        for product in block.experts.products
    )
    traffic, _ = mixture_traffic(block, job)
    return sum(routed) + job.machines.device.traffic_s(traffic) + messages
