"""Wrap the layers inside a block for one rank of a tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.calls import argument, with_arguments
from meshwright.core.parts import FusedPart, ranges
from meshwright.core.record import wrap
from meshwright.distributed.exchange.ranks import own_share
from meshwright.distributed.float8 import agreed
from meshwright.distributed.float8.products import Products, products_of
from meshwright.introspection.structure.local_form import LocalForm, counting_locally, share_of
from meshwright.models.moe import Router
from meshwright.planning.float8.operand_parts import COLUMN, ROW, WHOLE, OperandParts

from . import functions
from .runtime import Runtime, local
from .sums import summing_copies


@dataclass(frozen=True)
class ColumnLayer:
    """A linear layer of which each rank has some output features, or all of them but uses only some.

    Attributes:
        transposed: whether its weight is stored (in, out).
        copied: (dim, parts) of the parameters that have parts on several ranks and whose gradients are summed over
            those ranks in the backward.
        sums: whether the gradients of all parameters, each whole on every rank, are summed in the backward.
        parts: which operands of its products are parts.
    """

    module: nn.Module
    transposed: bool
    copied: dict[str, tuple[int, tuple[FusedPart, ...]]] = field(default_factory=dict)
    sums: bool = False
    parts: OperandParts = COLUMN

    @functools.cached_property
    def way(self) -> Products:
        """The products by which the layer computes, from its first forward on."""
        return products_of(self.module, self.transposed, self.parts)

    def tensors(self, runtime: Runtime) -> tuple[Tensor, Tensor | None, Products]:
        """Return this rank's weight and bias, and the products that use them."""
        weight, bias = self._local("weight", runtime), self._local("bias", runtime)
        assert weight is not None
        return weight, bias, self.way

    def _local(self, name: str, runtime: Runtime) -> Tensor | None:
        if (parameter := self.module._parameters.get(name)) is None:
            return None
        part = local(parameter)
        if self.sums:
            return functions.summing_gradients(part, runtime.group)
        if name not in self.copied:
            return part
        return summing_copies(part, *self.copied[name], runtime.group)


def local_linear(layer: ColumnLayer, runtime: Runtime) -> None:
    """Make a linear layer compute with this rank's part of its weight, whatever sizes its own forward expects."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def local_linear_forward(x: Tensor) -> Tensor:
            return agreed.linear(x, *layer.tensors(runtime), runtime.group)

        return local_linear_forward

    wrap(layer.module, make, f"column-parallel tp {runtime.group.size}")


def shared_linear(module: Any, parts: OperandParts, runtime: Runtime) -> None:
    """Make ranks agree on the float8 scales of a whole linear layer whose operands are partly parts.

    The layer's parameters must be plain tensors when it is called.
    """
    way = products_of(module, parts=parts)
    if way.parts != WHOLE:

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def agreed_linear_forward(input: Tensor) -> Tensor:
                return agreed.linear(input, module.weight, module.bias, way, runtime.group)

            return agreed_linear_forward

        wrap(module, make, f"scales agreed over tp {runtime.group.size}")


class SharedInput:
    """Gathers the common input of several column-parallel layers once, and computes all of them on the first call."""

    def __init__(self, runtime: Runtime, layers: list[ColumnLayer]):
        self.runtime, self.layers = runtime, layers
        self._taken: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            wrap(layer.module, self._make(number), f"column-parallel tp {runtime.group.size}")

    def _make(self, number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def column_forward(x: Tensor) -> Tensor:
                return self.output(number, x)

            return column_forward

        return make

    def output(self, number: int, x: Tensor) -> Tensor:
        """Return the output of this layer for the input ``x``, or for the part that ``x`` stands in for."""
        x = self.input_of(x)
        if self._taken is not x or number not in self._outputs:
            self._taken, self._outputs = x, dict(enumerate(self.compute(x)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._taken = None
        return output

    def input_of(self, x: Tensor) -> Tensor:
        """Return the part that a layer's input stands in for."""
        return self.runtime.behind(x)

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers."""
        return functions.column_parallel(
            x, [layer.tensors(self.runtime) for layer in self.layers], self.runtime.sequence
        )


@dataclass(frozen=True)
class Reduction:
    """How a row-parallel layer's partial sums are reduced.

    Attributes:
        defers: leave the partial sum to a later layer, and return zeros now.
        begins: this layer is the first to defer, and discards an earlier partial sum: a part of a block that backward
            recomputes leaves one that no layer takes.
        takes_deferred: reduce the deferred partial sums too.
        sums_bias: sum the bias's gradient over the ranks in the backward.
    """

    defers: bool = False
    begins: bool = False
    takes_deferred: bool = False
    sums_bias: bool = False


ALONE = Reduction()
"""Reduce at once, and nothing else in the same message."""


def row_parallel(module: nn.Module, transposed: bool, runtime: Runtime, reduction: Reduction = ALONE) -> None:
    """Make a linear layer row-parallel: each rank has some input features."""
    way: Products | None = None

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def row_forward(x: Tensor) -> Tensor:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            weight, bias = local(weight), None if bias is None else local(bias)
            if bias is not None and reduction.sums_bias:
                bias = functions.summing_gradients(bias, runtime.group)
            nonlocal way
            way = products_of(module, transposed, ROW) if way is None else way
            if reduction.defers:
                return collect_deferred(
                    runtime, x, agreed.linear(x, weight, None, way, runtime.group), bias, begins=reduction.begins
                )
            others = runtime.deferred if reduction.takes_deferred else None
            runtime.deferred = None if reduction.takes_deferred else runtime.deferred
            return functions.row_parallel(x, weight, bias, way, runtime.sequence, others)

        return row_forward

    wrap(module, make, f"row-parallel tp {runtime.group.size}")


def collect_deferred(runtime: Runtime, x: Tensor, summand: Tensor, bias: Tensor | None, *, begins: bool) -> Tensor:
    """Leave a partial sum to the layer that reduces it; return zeros, or the bias, in its place.

    Args:
        x: the layer's input.
        begins: see ``Reduction``.
    """
    runtime.deferred = (
        summand if begins or runtime.deferred is None else runtime.deferred + summand.view_as(runtime.deferred)
    )
    share, features = runtime.sequence.own_shape(x), summand.shape[-1]
    return summand.new_zeros((*share, features)) if bias is None else bias.expand(*share, features).clone()


def container(module: nn.Module, path: str, form: LocalForm, runtime: Runtime) -> None:
    """Wrap the module around a region: its input is a stand-in, and the sizes it reads are this rank's own."""
    numbers = [
        (module.get_submodule(number.module.removeprefix(path).removeprefix(".")), number) for number in form.numbers
    ]

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def container_forward(*args: Any, **kwargs: Any) -> Any:
            given: dict[int | str, Tensor] = {}
            made = None
            if form.hidden and (runtime.sequence.cut or form.narrow):
                parts = runtime.group.size if form.narrow else 1
                made = runtime.stand_in(argument(args, kwargs, form.hidden[0]), parts)
                given |= dict.fromkeys(form.hidden, made)
            for shared in form.arguments:
                whole = argument(args, kwargs, shared.key)
                given[shared.key] = share_of(
                    whole, shared, runtime.sequence.rows, runtime.group.rank, runtime.group.size
                )
            args, kwargs = with_arguments(args, kwargs, given)
            try:
                with counting_locally(numbers):
                    return forward(*args, **kwargs)
            finally:
                runtime.forget(made)

        return container_forward

    wrap(module, make, f"this rank's share of tp {runtime.group.size}")


def norm_over_all_features(module: nn.Module, parts: tuple[FusedPart, ...], runtime: Runtime) -> None:
    """Gather the features of a norm's input, of which each rank has some; each rank keeps its own of the output."""
    (part,) = parts
    group = runtime.group
    (low, high), copies = ranges(parts, group.rank, group.size)[0], part.copies(group.size)

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def gathered_norm_forward(x: Tensor) -> Tensor:
            return forward(functions.whole_features(x, copies, group))[..., low:high]

        return gathered_norm_forward

    wrap(module, make, f"gathers features over tp {runtime.group.size}")


def routers_of_parts(model: nn.Module, runtime: Runtime) -> None:
    """Wrap every router: each rank routes its own tokens, and sums over a whole sequence span the ranks.

    The padding in the last rank's part of a sequence is not routed.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.across = runtime.group.sum
            wrap(module, lambda forward: _of_part(forward, runtime), f"routes its tokens of tp {runtime.group.size}")


def _of_part(forward: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    def route_own_tokens(x: Tensor, routed: Tensor | None = None) -> Any:
        sequence = runtime.sequence
        if routed is None and sequence.filled:
            routed = torch.ones((len(x), sequence.length(x.shape[1])), dtype=torch.bool, device=x.device)
        return forward(x, None if routed is None else own_share(routed, sequence.group.rank, sequence.group.size))

    return route_own_tokens
