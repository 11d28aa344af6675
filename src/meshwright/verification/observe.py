"""Observing a step: of every module's output, and of the gradient that comes back to it, a small sketch per row.

A sketch is a few random projections (Johnson and Lindenstrauss 1984): two tensors with equal sketches are equal, but for chances that
do not matter, and their distance is kept. Rows are told apart, so that ranks with different rows can be put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.names import clean

WIDTH = 8
"""Numbers per row."""


@dataclass
class Observed:
    """Sketches by module, in the order in which modules first ended (forward) and were first reached (backward)."""

    forward: dict[str, list[Tensor]] = field(default_factory=dict)
    backward: dict[str, list[Tensor]] = field(default_factory=dict)

    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(rows, WIDTH) float64 for each module: all microbatches one behind the other."""
        forward = {name: torch.cat(parts) for name, parts in self.forward.items()}
        # A backward goes through the microbatches in turn, and through a module's calls in reverse: one call per microbatch is assumed.
        return forward, {name: torch.cat(parts) for name, parts in self.backward.items()}


@contextmanager
def observing(model: nn.Module) -> Iterator[Observed]:
    """Sketch what ``model`` computes inside the block. What recomputation does once more in the backward is passed over."""
    observed = Observed()
    handles = [
        module.register_forward_hook(_hook(clean(name), observed)) for name, module in model.named_modules() if not _holds_others(module)
    ]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


def _holds_others(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _hook(name: str, observed: Observed):
    def note(module: nn.Module, args: Any, output: Any) -> None:
        tensor = _tensor_of(output)
        if tensor is None or torch._C._current_graph_task_id() != -1:
            return
        observed.forward.setdefault(name, []).append(sketch(tensor.detach()))
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: observed.backward.setdefault(name, []).append(sketch(gradient)))

    return note


def _tensor_of(output: Any) -> Tensor | None:
    """The floating-point tensor that an output is, or is led by."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.dim() >= 2 else None


def sketch(tensor: Tensor) -> Tensor:
    """(rows, ...) → (rows, WIDTH) float64 on the CPU."""
    rows = tensor.flatten(1)
    return (rows.double() @ _directions(rows.shape[1]).to(rows.device)).cpu()


@lru_cache(maxsize=64)
def _directions(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) / WIDTH**0.5
