"""Compute parallel norms with the column-parallel layers after them, and layers with adapters, on one rank.

The module that adds an adapter's output to its host's runs unchanged, on this rank's parts of the weights. So dropout,
scales, casts, several adapters and disabled adapters work as their library wrote them, and the messages are the same as
without adapters: the sequence is gathered before the module, or its partial sums are reduced after it.

Gathering the norms' outputs instead would send one tensor for each. A rank computes partial gradients of the norms'
parameters either way: here over all tokens for its own features, otherwise over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.record import holding, wrap
from meshwright.distributed.float8 import agreed
from meshwright.distributed.float8.products import Products

from . import functions
from .functions import TokenSequence, now_or_later
from .layers import ColumnLayer, Reduction, Runtime, SharedInput, collect_deferred, local

# --- compute linear layers with adapters on one rank of a tensor-parallel group


class GatheredInput:
    """Gathers one input for several column-parallel layers, some with adapters, and gives each the whole sequence.

    Adapters save the whole input for backward. An adapter's first layer is whole on all ranks, and each rank computes a
    partial gradient of it.
    """

    def __init__(self, runtime: Runtime, modules: list[nn.Module]):
        self.runtime, self.modules = runtime, modules
        self._taken: Tensor | None = None
        self._whole: Tensor | None = None
        self._served: set[int] = set()
        for number, module in enumerate(modules):
            wrap(module, self._make(number), f"input gathered over tp {runtime.group.size}")

    def _make(self, number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def gathered_input_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                return forward(self.whole(number, x), *args, **kwargs)

            return gathered_input_forward

        return make

    def whole(self, number: int, x: Tensor) -> Tensor:
        """Return the whole input of the module with this number, of which ``x`` is this rank's part."""
        x = self.runtime.behind(x)
        if self._taken is not x or number in self._served or self._whole is None:
            self._taken, self._whole = x, functions.gathered(x, self.runtime.sequence)
            self._served.clear()
        self._served.add(number)
        whole = self._whole
        if len(self._served) == len(self.modules):
            self._taken = self._whole = None
        return whole


def local_summand(layer: ColumnLayer, runtime: Runtime, *, sums_at_once: bool) -> None:
    """Make a row-parallel layer, or the first layer of an adapter beside it, return a partial sum over the ranks.

    The first rank alone adds the bias, so that its gradient is a sum over the ranks.
    """

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def partial_sum_forward(x: Tensor) -> Tensor:
            weight, bias, way = layer.tensors(runtime)
            if bias is not None:
                bias = functions.summing_gradients(bias, runtime.group) if sums_at_once else bias
                # every rank needs a gradient, or the sum over the ranks would wait for one
                bias = bias if runtime.group.rank == 0 else bias * 0
            return agreed.linear(x, weight, bias, way, runtime.group)

        return partial_sum_forward

    wrap(layer.module, make, f"partial sums over tp {runtime.group.size}")


def reduced(around: nn.Module, runtime: Runtime, reduction: Reduction) -> None:
    """Reduce the partial sums that the module around a row-parallel layer and its adapters returns."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def reduced_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            summand = forward(x, *args, **kwargs)
            if reduction.defers:
                return collect_deferred(runtime, x, summand, None, begins=reduction.begins)
            others = runtime.deferred if reduction.takes_deferred else None
            runtime.deferred = None if reduction.takes_deferred else runtime.deferred
            return _reduced(summand if others is None else summand + others.view(summand.shape), runtime.sequence)

        return reduced_forward

    wrap(around, make, f"summed over tp {runtime.group.size}")


def _reduced(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Reduce partial sums (rows, length, features): to this rank's part of the sequence if that is cut."""
    return _Reduced.apply(x, sequence, sequence.shape_of(x))


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: TokenSequence, shape: tuple[int | None, int]) -> Tensor:
        ctx.sequence, ctx.shape = sequence, shape
        # recomputed forwards end at the last saved tensor: the plan expects this message to be sent again
        ctx.save_for_backward(x.new_empty(0))
        return sequence.reduced(x if sequence.cut else x.clone())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        _ = ctx.saved_tensors
        ctx.sequence.restore(ctx.shape)
        return ctx.sequence.whole(gradient), None, None


def refuse_idle(module: nn.Module, path: str) -> None:
    """Refuse calls of an adapter that was switched off when the model was cut: it was left whole."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def refused_forward(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(
                f"{path} is an adapter that was switched off when the model was cut for tensor parallelism, so it was"
                f" left whole and cannot"
                f" be used now. Switch on the adapters that you want to use, all of them, before you lay out the model."
            )

        return refused_forward

    wrap(module, make, "switched off when the model was cut")


# --- compute parallel norms and the column-parallel layers after them from one gathered input

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
