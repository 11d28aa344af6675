"""Compute parallel norms and the column-parallel layers after them from one gathered input.

Gathering the norms' outputs instead would send one tensor for each. A rank computes partial gradients of the norms'
parameters either way: here over all tokens for its own features, otherwise over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.calls import holding
from meshwright.core.errors import UnsupportedError
from meshwright.core.record import wrap
from meshwright.distributed.float8 import agreed
from meshwright.distributed.float8.products import Products

from . import functions
from .functions import now_or_later
from .layers import ColumnLayer, SharedInput
from .runtime import Runtime, local
from .sequence import Sequence as TokenSequence

Normalise = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Type of a norm's forward: (input, parameters) → output."""


@dataclass(frozen=True)
class Branch:
    """A norm and the layers that take its output.

    Attributes:
        norm: the norm's forward.
        parameters: number of its parameters.
        ways: how each layer multiplies.
    """

    norm: Normalise
    parameters: int
    ways: tuple[Products, ...]


def normed_column_parallel(
    x: Tensor, branches: tuple[Branch, ...], tensors: list[Tensor | None], sequence: TokenSequence
):
    """Compute several norms of one input, and the column-parallel linear layers after each.

    Args:
        x: (rows, share, features), this rank's part of the sequence (all of it if the sequence is not cut).
        tensors: for each branch the norm's parameters, then this rank's weight and bias of each layer.

    Returns:
        For each layer (rows, length, own output features). The gradients of the input are summed over the ranks; those
        of the norms' parameters are partial.
    """
    return _NormedColumnParallel.apply(x, sequence, sequence.shape_of(x), branches, *tensors)


class _NormedColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sequence: TokenSequence,
        shape: tuple[int | None, int],
        branches: tuple[Branch, ...],
        *tensors: Tensor | None,
    ):
        weights = [tensors[first + 2 * i] for branch, _, first in _dealt(branches) for i in range(len(branch.ways))]
        largest = agreed.before_outputs(x, weights, _ways(branches), sequence.group)  # type: ignore[arg-type]
        of_layers = iter(largest)
        whole = sequence.whole(x)
        outputs: list[Tensor] = []
        for branch, start, first in _dealt(branches):
            normed = branch.norm(whole, tensors[start:first])  # type: ignore[arg-type]
            for i, way in enumerate(branch.ways):
                weight, bias = tensors[first + 2 * i : first + 2 * i + 2]
                outputs.append(way.output(normed, weight, bias, next(of_layers)))  # type: ignore[arg-type]
        ctx.sequence, ctx.shape, ctx.branches = sequence, shape, branches
        ctx.tracked = tensors if sequence.deferred is not None else ()
        ctx.kept_part = sequence.cut and sequence.regather
        ctx.save_for_backward(x if ctx.kept_part else whole, *tensors, *agreed.to_save(largest))
        ctx.tensors = len(tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        kept, *rest = ctx.saved_tensors
        needed, ways = ctx.needs_input_grad, _ways(ctx.branches)
        earlier, tensors = agreed.saved(rest[ctx.tensors :], len(ways)), rest[: ctx.tensors]
        sequence = ctx.sequence
        sequence.restore(ctx.shape)
        of_layers = iter(
            agreed.before_gradients(grad_outputs, ways, earlier, _asked(ctx.branches, needed), sequence.group)
        )
        whole = (sequence.whole(kept) if ctx.kept_part else kept).detach().requires_grad_(needed[0])
        grad_x: Tensor | None = None
        found: list[Tensor | None] = [None] * len(tensors)
        gradients = iter(grad_outputs)
        for branch, start, first in _dealt(ctx.branches):
            parameters = [p.detach().requires_grad_(needed[4 + start + i]) for i, p in enumerate(tensors[start:first])]
            with torch.enable_grad():
                normed = branch.norm(whole, parameters)
            back: Tensor | None = None
            for i, way in enumerate(branch.ways):
                place, gradient, largest = first + 2 * i, next(gradients), next(of_layers)
                if normed.requires_grad:
                    summand = way.of_input(gradient, tensors[place], largest)
                    back = summand if back is None else back.add_(summand)
                found[place] = (
                    now_or_later(ctx, place, gradient, normed.detach(), way, largest) if needed[4 + place] else None
                )
                found[place + 1] = gradient.flatten(0, -2).sum(0) if needed[5 + place] else None
            asked = [(place, tensor) for place, tensor in enumerate((whole, *parameters)) if tensor.requires_grad]
            if asked:
                of_norm = torch.autograd.grad(normed, [tensor for _, tensor in asked], back, allow_unused=True)
                for (place, _), gradient in zip(asked, of_norm, strict=True):
                    if place:
                        found[start + place - 1] = gradient
                    elif gradient is not None:
                        grad_x = gradient if grad_x is None else grad_x + gradient
        return sequence.reduced(grad_x) if grad_x is not None else None, None, None, None, *found


def _dealt(branches: tuple[Branch, ...]) -> Iterator[tuple[Branch, int, int]]:
    """Yield each branch, with the offsets of its norm's parameters and of its layers' weights among all tensors."""
    start = 0
    for branch in branches:
        first = start + branch.parameters
        yield branch, start, first
        start = first + 2 * len(branch.ways)


def _ways(branches: tuple[Branch, ...]) -> list[Products]:
    return [way for branch in branches for way in branch.ways]


def _asked(branches: tuple[Branch, ...], needed: Sequence[bool]) -> list[bool]:
    """Return for each layer whether a gradient of its input or weight is needed; ``needed`` is the node's list."""
    found: list[bool] = []
    for branch, start, first in _dealt(branches):
        flows = needed[0] or any(needed[4 + start : 4 + first])
        found += [flows or needed[4 + first + 2 * i] for i in range(len(branch.ways))]
    return found


@dataclass(frozen=True)
class NormedLayers:
    """A norm and the column-parallel layers that alone use its output.

    Attributes:
        sums: whether the gradients of its parameters are summed over the ranks in the backward.
    """

    norm: nn.Module
    layers: list[ColumnLayer]
    sums: bool

    def parameters(self, runtime: Runtime) -> list[Tensor]:
        """Return the norm's parameters as plain tensors."""
        found = [p if p is None else local(p) for p in self.norm._parameters.values()]
        held = [parameter for parameter in found if parameter is not None]
        return [functions.summing_gradients(parameter, runtime.group) for parameter in held] if self.sums else held


class SharedNormInput(SharedInput):
    """Computes parallel norms and the layers after them together, when the first of these layers is called.

    Until then the norms return stand-ins, since nothing else reads their output.
    """

    def __init__(self, runtime: Runtime, branches: list[NormedLayers]):
        super().__init__(runtime, [layer for branch in branches for layer in branch.layers])
        self.branches = branches
        self.plan = tuple(
            Branch(_on_norm(b.norm), len(b.parameters(runtime)), tuple(x.way for x in b.layers)) for b in branches
        )
        for branch in branches:
            wrap(branch.norm, _later, f"computed with the layers behind it, tp {runtime.group.size}")

    def input_of(self, x: Tensor) -> Tensor:
        entered = getattr(super().input_of(x), "normed_later", None)
        if entered is None:
            raise UnsupportedError(
                f"a layer behind {' and '.join(type(branch.norm).__name__ for branch in self.branches)}, which were"
                " measured side by side, was given another tensor than its norm's output. Set layout.tp = 1."
            )
        return entered

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        tensors: list[Tensor | None] = []
        for branch in self.branches:
            tensors += branch.parameters(self.runtime)
            for layer in branch.layers:
                tensors += layer.tensors(self.runtime)[:2]
        return normed_column_parallel(x, self.plan, tensors, self.runtime.sequence)


def _later(forward: Callable[..., Any]) -> Callable[..., Any]:
    def norm_later_forward(x: Tensor) -> Tensor:  # new for each norm: it refers to the forward it wraps
        return stand_in_for(x)

    return norm_later_forward


def stand_in_for(x: Tensor) -> Tensor:
    """Return a stand-in without memory for a norm of ``x``; the layers after the norm compute the norm itself."""
    made = x.detach().new_full((1,), torch.nan).expand(x.shape)
    made.normed_later = x  # type: ignore[attr-defined]
    return made


def _on_norm(module: nn.Module) -> Normalise:
    """Return the module's own forward as a function of its input and parameters."""
    forward = module.forward
    names = [name for name, parameter in module._parameters.items() if parameter is not None]

    def run(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        with holding(module, dict(zip(names, parameters, strict=True))):
            return forward(x)

    return run
