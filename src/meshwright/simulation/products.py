"""Compute the seconds of a block's products, of experts and of the host that launches them."""

from __future__ import annotations

from meshwright.simulation.cards import Group
from meshwright.simulation.job import BlockShape, Job, Product

# --- price the products of linear layers on one rank, and the casts of their operands to 8 or 4 bits

CAST = {"float8": 1.0, "mxfp8": 1.0, "nvfp4": 0.56}
"""Bytes of an operand's element in the dtypes that half-precision tensors are cast to, scales included."""
QUANTISED = 0.6
"""Bandwidth of kernels that quantise in blocks, rowwise and columnwise, over that of other kernels bound by memory:
4.1 TB/s on a B200 (NVIDIA/TransformerEngine, pull request 3137, C++ kernels, 4096 x 14336)."""
CAST_S = 8e-6
"""Seconds of a kernel that quantises, beside its traffic: those of a small tensor on a B200 (NVIDIA/TransformerEngine,
pull requests 2634 and 3137)."""


def rank_part(product: Product, tp: int) -> tuple[float, float]:
    """Return (depth, columns) of one rank's part of a product."""
    if product.cut == "column":
        return product.depth, product.columns / tp
    if product.cut == "row":
        return product.depth / tp, product.columns
    return product.depth, product.columns


def three_products(
    job: Job, tokens: float, depth: float, columns: float, number: float = 1
) -> tuple[float, float, float]:
    """Return the seconds of ``number`` products' forward, of their weights' gradients, and of their inputs'."""
    run, device = job.execution, job.machines.device
    size = CAST.get(run.products, run.compute_bytes)
    forward = device.product_s(tokens, columns, depth, run.products, size, number)
    weight = device.product_s(depth, columns, tokens, run.products, size, number)
    weight += device.traffic_s(number * depth * columns * (run.gradient_bytes + run.reduce_bytes))
    inputs = device.product_s(tokens, depth, columns, run.products, size, number)
    apart = 0.0 if run.mixture.grouped else (number - 1) * device.kernel_s
    return forward + apart, weight + apart, inputs + apart


def attention_products(block: BlockShape, job: Job, *, from_latents: bool = False) -> float:
    """Return the seconds of the forward products of an attention module's linear layers.

    Args:
        from_latents: only of those from latents up to queries, keys and values.
    """
    found = (product for product in block.products if product.attends)
    if from_latents:
        found = (product for product in found if product.cut == "column" and product.depth != block.hidden)
    return sum(three_products(job, job.tokens, *rank_part(product, job.layout.tp))[0] for product in found)


def cast_seconds(block: BlockShape, job: Job) -> tuple[float, float]:
    """Return the seconds of quantising, rowwise and columnwise, the inputs of products forward, and backward the
    gradients of their outputs; and weights, where each microbatch casts them."""
    run, device = job.execution, job.machines.device
    if run.products not in CAST:
        return 0.0, 0.0
    parts = [rank_part(product, job.layout.tp) for product in block.products]
    inputs, outputs = (sum(sizes) * job.tokens for sizes in zip(*parts, strict=True))
    weights = sum(product.elements for product in block.products) / job.layout.tp
    kernels: float = len(block.products)
    if block.experts:
        copies, experts = job.expert_copies(block), block.experts.number / job.layout.ep
        inputs += copies * sum(product.depth for product in block.experts.products)
        outputs += copies * sum(product.columns for product in block.experts.products)
        weights += block.experts.elements / block.experts.number * experts
        kernels += len(block.experts.shared)
        kernels += len(block.experts.products) * (1 if run.mixture.grouped else experts)
    weights *= run.casts_weights
    read_and_write = (run.compute_bytes + 2.0) / (1.0 if run.products == "float8" else QUANTISED)
    forward, backward = (device.traffic_s((moved + weights / 2) * read_and_write) for moved in (inputs, outputs))
    return forward + kernels * CAST_S, backward + kernels * CAST_S


# --- price the host

FORWARD_OPERATORS, BACKWARD_OPERATORS = 26, 44
"""Operators that a block of a decoder dispatches, forward and backward, where chains run as one kernel: assumed."""
EXPERT_OPERATORS, PER_EXPERT = 280, 4
"""Further operators of a mixture's forward: routing, permutations, dispatch; and for each of a rank's experts, since a
grouped product launches a kernel, and in 8 bits casts, for each. The first was chosen on published mixtures."""
ROUTING = 31
"""Those of a mixture's operators that route, in fused kernels (NVIDIA/Megatron-LM, section 2.1.4 of
docs/discussions/deepseek-v3-gb200-optimization/deepseek-v3-gb200-optimization.md)."""
CASTING = 2.0
"""Operators in 8 or 4 bits, over those in half precision: each product's operands are cast and scaled."""
UNFUSED = 1.6
"""Operators without fusion, over those with it."""


def host_seconds(block: BlockShape, job: Job) -> tuple[tuple[float, float], float]:
    """Return the seconds in which the host launches a block's forward, (of its experts, of the rest), and backward.

    A CUDA graph launches the kernels of its part at once: of a whole step; or of all but the experts, whose numbers of
    rows only the device knows.
    """
    run = job.execution
    if run.graphs == "full":
        return (0.0, 0.0), 0.0
    rest, experts = FORWARD_OPERATORS, 0.0
    if block.experts:
        rest, experts = rest + ROUTING, EXPERT_OPERATORS - ROUTING + PER_EXPERT * block.experts.number / job.layout.ep
    if run.graphs == "partial":
        rest = 1
    each = job.machines.device.host_operator_s * (1.0 if run.fused else UNFUSED)
    each *= CASTING if run.products in CAST else 1.0
    times = BACKWARD_OPERATORS / FORWARD_OPERATORS + (1 if run.recompute == "full" else 0)
    return (experts * each, rest * each), times * (experts + rest) * each


def starved_seconds(host: tuple[float, float], mixture: float, rest: float) -> float:
    """Return the seconds of a forward in which the device has nothing to do, since the host has launched nothing.

    Once in a mixture the host waits for the device, to learn how many rows each expert gets. Then both begin at once,
    and what the device takes longer than the host for the experts is the host's lead for the rest.

    Args:
        host: seconds of the host, for the experts and for the rest.
        mixture: the device's seconds for experts and their messages; 0 where the host does not wait.
        rest: the device's other seconds.
    """
    experts, others = host
    if not mixture:
        return max(0.0, experts + others - rest)
    lead = max(0.0, mixture - experts)
    return max(0.0, experts - mixture) + max(0.0, others - rest - lead)


# --- price what a mixture of experts adds to a block

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
    inside = Group(ranks, 1).in_node(machines)
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
