"""Attention: which kernel the library chooses, and each fused kernel against blocks in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .child import Outcome
from .machine import machine

BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Relative 2-norm between a kernel in a dtype and blocks in fp64, of outputs, logarithms and gradients."""
HEADS = {
    ("cuda flash", "bfloat16"): ((64, 64), (128, 128), (256, 256)),
    ("cuda flash", "float16"): ((64, 64), (128, 128), (256, 256)),
    ("cuda efficient", "float32"): ((64, 64), (128, 128), (192, 128)),
    ("cuda efficient", "bfloat16"): ((192, 128), (64, 128)),  # flash takes equal heads before it
    ("cpu flash", "float32"): ((64, 64),),
}
"""Features of a head's keys and values, by kernel and dtype."""
LENGTHS = (3, 129, 320, 2048)
GROUPS = ((4, 4), (8, 2))
"""Numbers of query heads and of key heads."""


def table() -> Outcome:
    """Print the kernel of each kind of attention on this device."""
    from meshwright.planning.context.kernels import Need, choose_kernel

    device, figures, lines = machine().device, {}, []
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        for keys, values, extra in (
            (64, 64, {}),
            (128, 128, {}),
            (192, 128, {}),
            (512, 512, {}),
            (64, 64, {"has_cap": True}),
        ):
            kernel, why = choose_kernel(Need(device, dtype, keys, values, **extra))
            title = f"{dtype}, heads of {keys}/{values}{', soft cap' if extra else ''}"
            figures[title] = kernel.name
            lines.append(f"{title:<36} {kernel.name:<15} {why}")
    return figures, lines


def fused(name: str, dtype: str) -> Outcome:
    """Compare a fused kernel with blocks in fp64, forward and backward, over lengths, heads and groups."""
    here = machine()
    if name != "cpu flash":
        here.needs_cuda(f"{name} is a kernel of CUDA's")
    device = "cpu" if name == "cpu flash" else here.device
    worst, figures = ("", 0.0), {}
    for features in HEADS[name, dtype]:
        for length in (3, 40) if here.is_dry else LENGTHS:
            for groups in GROUPS:
                shape = f"heads of {features[0]}/{features[1]}, {length} tokens, {groups[0]}/{groups[1]} heads"
                figures[shape] = error = _error(name, dtype, device, length, features, groups)
                worst = max(worst, (shape, error), key=lambda pair: pair[1])
    beyond = {shape: error for shape, error in figures.items() if not error <= BOUNDS[dtype]}
    assert not beyond, f"beyond {BOUNDS[dtype]}: {beyond}"
    return figures, [f"{len(figures)} shapes; farthest {worst[1]:.1e} of {BOUNDS[dtype]:.0e} ({worst[0]})"]


def _error(
    name: str, dtype: str, device: str, length: int, features: tuple[int, int], groups: tuple[int, int]
) -> float:
    from meshwright.distributed.context.kernels import KeysAtHand, Scores, attention, fused_kernel
    from meshwright.introspection.mixing.masks import KeyRanges

    sizes = ((groups[0], features[0]), (groups[1], features[0]), (groups[1], features[1]))  # queries, keys, values
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64).to(device)
        for heads, width in sizes
    ]
    place = torch.arange(length, device=device)[None]
    causal = length * 5 // 8  # a triangle, then queries that see every key
    reach = KeyRanges(torch.zeros_like(place), torch.where(place < causal, place + 1, length))

    def attended(given: list[Tensor]) -> list[Any]:
        output, logarithm = attention(*given, KeysAtHand(reach), Scores(features[0] ** -0.5))
        weights = torch.linspace(-1, 1, output.numel(), device=device).view(output.shape)
        (output * weights).sum().backward()
        return [output.detach(), logarithm.detach(), *(x.grad for x in given)]

    narrow = [x.to(getattr(torch, dtype)).requires_grad_() for x in exact]
    chosen = fused_kernel(narrow[0], narrow[2], has_cap=False, has_sinks=False)
    assert chosen is not None and chosen.kernel.name == name, f"chosen is {chosen and chosen.kernel.name}, not {name}"
    wide = [x.detach().double().requires_grad_() for x in narrow]
    pairs = list(zip(attended(narrow), attended(wide), strict=True))
    scale = max(float(other.norm()) for _, other in pairs[2:])
    return max(float((mine.double() - other).norm()) / max(float(other.norm()), 1e-6 * scale) for mine, other in pairs)
