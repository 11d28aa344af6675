"""Price the products of linear layers on one rank, and the casts of their operands to 8 or 4 bits."""

from __future__ import annotations

from .architecture import BlockShape, Product
from .execution import Job

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
