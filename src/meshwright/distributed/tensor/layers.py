"""Wrap the layers inside a block for one rank of a tensor-parallel group, with state that a model's modules share.

A wrapped forward computes with plain tensors, this rank's parts; outside forwards the parameters are DTensors. Of
layers with adapters, the module that adds an adapter's output to its host's runs unchanged: dropout, scales and casts
work as their library wrote them, and messages are the same as without adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart, ranges
from meshwright.core.record import argument, holding, recall, with_arguments, without_values, wrap
from meshwright.distributed.exchange import RankGroup, linear_map, own_share
from meshwright.distributed.nf4 import QuantizedLinear
from meshwright.distributed.products import Products, agreed_linear, products_of
from meshwright.distributed.torch_private import local_part, spec_of
from meshwright.distributed.weights.parts_tensor import placed
from meshwright.introspection.structure.local_search import LocalForm, counting_locally, share_of
from meshwright.models.layers import Router
from meshwright.planning.tensor.plan import COLUMN, ROW, WHOLE, OperandParts

from . import functions
from .functions import Branch, TokenSequence
from .loss import VocabularyShard

# --- share state among the wrapped modules of one model, and give them plain local parameters


@dataclass
class LossRequest:
    """A request that the head compute a loss itself, in so many chunks of tokens, instead of logits.

    Labels and weights, factors of the tokens' losses, are (rows, seq); ``result``: the sum, after the model was called.
    """

    labels: Tensor
    chunks: int
    weights: Tensor | None = None
    result: Tensor | None = None


@dataclass
class LossSite:
    """The place where a model's head finds a request for a loss.

    Attributes:
        request: the loss to compute instead of logits, or None.
        answer: what the model returns in place of the deferred logits that its head gave it, as a function of what it
            made of these; None where the head computed logits.
        shard: this rank's part of the vocabulary that the last answer is of; None: all of it.
    """

    request: LossRequest | None = None
    answer: Callable[[Tensor], Tensor] | None = None
    shard: VocabularyShard | None = None


@dataclass
class Runtime(LossSite):
    """State shared by the wrapped modules of one model.

    Attributes:
        sequence: how activations are laid out between the blocks.
        logits: "whole": the model returns all logits on every rank; "own": those of this rank's part of the vocabulary.
        arriving: this rank's part of the embedding's output, on its way to the first block.
        deferred: partial sums that wait for the row-parallel layer that reduces them.
        own: modules whose parameters are not replaced by plain tensors, since the wrapper of their forward computes
            with the local parts.
    """

    sequence: TokenSequence = field(kw_only=True)
    logits: Literal["whole", "own"] = "whole"
    arriving: Tensor | None = None
    deferred: Tensor | None = None
    own: set[nn.Module] = field(default_factory=set)

    @property
    def group(self) -> RankGroup:
        return self.sequence.group

    def stand_in(self, part: Tensor, parts: int = 1) -> Tensor:
        """Return a tensor with the shape of the whole sequence that takes no memory, for code that only reads shapes.

        Its values are NaN. It has one of ``parts`` parts of the features.
        """
        sequence = self.sequence
        if not sequence.cut:
            shape = part.shape
        elif part.dim() == 2:
            shape = (sequence.rows * sequence.length(part.shape[0] // sequence.rows), part.shape[-1])
        else:
            shape = (part.shape[0], sequence.length(part.shape[1]), *part.shape[2:])
        made = without_values(part, (*shape[:-1], shape[-1] // parts))
        made.stands_for = part  # type: ignore[attr-defined]
        return made


def behind(x: Tensor) -> Tensor:
    """Return the tensor that a stand-in replaces, or ``x`` itself if it is no stand-in."""
    return getattr(x, "stands_for", x)


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the shared state of a model's wrapped modules, or None if the model is not cut."""
    return recall(model, Runtime)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiably."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():  # the compiler can trace to_local, but not the internals of a DTensor
        return parameter.to_local()
    return _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """``to_local`` in half the time: the layout of the whole gradient is known, and not derived anew."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        part = local_part(parameter)
        ctx.spec, ctx.strides = spec_of(parameter), part.stride()
        ctx.set_materialize_grads(False)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Tensor | None:
        (gradient,) = grad_outputs
        if gradient is None:
            return None
        if gradient.stride() != ctx.strides:  # the strides of the whole are derived from the part's
            gradient = gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)
        return placed(gradient, copy.copy(ctx.spec))  # a copy: the dispatcher may write into it


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return this rank's parts of weight and bias, differentiably."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    return local(weight), None if bias is None else local(bias)


@dataclass(frozen=True)
class LocalView:
    """A parameter of its ``home``, of which forwards see this rank's part as a plain tensor.

    The backward multiplies its gradient by a factor, and sums it over a group.
    """

    home: nn.Module
    name: str
    summed_over: RankGroup | None = None
    gradient_factor: float = 1.0

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        summing: Iterable[str] = (),
        group: RankGroup | None = None,
        gradient_factor: float = 1.0,
    ) -> list[LocalView]:
        """Return views of all parameters of the module itself.

        The gradients of those in ``summing`` are summed over ``group``.
        """
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        return [cls(module, name, group if name in summing else None, gradient_factor) for name in names]

    @property
    def key(self) -> str:
        """The attribute that shows the part: of bytes one that other code does not read."""
        return "local_weight" if isinstance(self.home, QuantizedLinear) and self.name == "weight" else self.name

    def part(self, parameter: Tensor) -> Tensor:
        part = local(parameter)
        if self.gradient_factor != 1.0:
            part = linear_map(part, lambda x: x.view_as(x), lambda gradient: gradient * self.gradient_factor)
        return part if self.summed_over is None else functions.summing_gradients(part, self.summed_over)


def use_local_parameters(module: nn.Module, views: Iterable[LocalView] | None = None) -> None:
    """Show this rank's parts of some parameters as plain tensors to every module while the module's forward runs.

    Parameters that an outer forward already replaced stay as they are. Parameters that FSDP has not gathered are left
    to the unit that gathers them: its forward runs inside this one.

    Args:
        views: the parameters, of this module or of modules inside; by default all of the module's own.
    """
    found = tuple(LocalView.of(module) if views is None else views)

    forward = module.forward

    def forward_with_local_parameters(*args: Any, **kwargs: Any) -> Any:
        held: list[tuple[dict[str, Any], str]] = []
        try:
            for view in found:
                place, parameter = view.home.__dict__, view.home._parameters[view.name]
                if parameter is None or view.key in place:
                    continue
                # cut over no axis but the tensor axis
                is_gathered = not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1
                if view.home is module or is_gathered:
                    place[view.key] = view.part(parameter)
                    held.append((place, view.key))
            return forward(*args, **kwargs)
        finally:
            for place, name in held:
                place.pop(name, None)

    wrap(module, forward_with_local_parameters, "local parameters")


# --- wrap the layers inside a block for one rank of a tensor-parallel group


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

    @property
    def way(self) -> Products:
        """The products by which the layer computes."""
        return products_of(self.module, self.transposed, self.parts)

    def tensors(self, runtime: Runtime) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight and bias."""
        found: list[Any] = []
        for name in ("weight", "bias"):
            parameter = self.module._parameters.get(name)
            part = None if parameter is None else local(parameter)
            if part is not None and self.sums:
                part = functions.summing_gradients(part, runtime.group)
            elif part is not None and name in self.copied:
                part = functions.summing_copies(part, *self.copied[name], runtime.group)
            found.append(part)
        return found[0], found[1]


def local_linear(layer: ColumnLayer, runtime: Runtime) -> None:
    """Make a linear layer compute with this rank's part of its weight, whatever sizes its own forward expects."""

    def local_linear_forward(x: Tensor) -> Tensor:
        return agreed_linear(x, *layer.tensors(runtime), layer.way, runtime.group)

    wrap(layer.module, local_linear_forward, f"column-parallel tp {runtime.group.size}")


def shared_linear(module: Any, parts: OperandParts, runtime: Runtime) -> None:
    """Make ranks agree on the float8 scales of a whole linear layer whose operands are partly parts.

    The layer's parameters must be plain tensors when it is called.
    """
    way = products_of(module, parts=parts)
    if way.parts != WHOLE:

        def agreed_linear_forward(input: Tensor) -> Tensor:
            return agreed_linear(input, module.weight, module.bias, way, runtime.group)

        wrap(module, agreed_linear_forward, f"scales agreed over tp {runtime.group.size}")


@dataclass(frozen=True)
class LayersOfInput:
    """Column-parallel layers that alone use one input, or a norm of it; ``sums`` in the backward its gradients."""

    layers: list[ColumnLayer]
    norm: nn.Module | None = None
    sums: bool = False

    def branch(self) -> Branch:
        """Describe norm and layers as functions of their input and parameters."""
        ways, module = tuple([layer.way for layer in self.layers]), self.norm
        if module is None:
            return Branch(ways)
        forward, names = module.forward, [name for name, p in module._parameters.items() if p is not None]

        def run(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
            with holding(module, dict(zip(names, parameters, strict=True))):
                return forward(x)

        return Branch(ways, run, len(names))


class SharedInput:
    """Gathers an input once, and computes all column-parallel layers of it, or of norms of it, on the first call.

    Until then norms return stand-ins, since nothing else reads their output. Gathering the norms' outputs instead would
    send one tensor for each. A rank computes partial gradients of the norms' parameters either way: here over all
    tokens for its own features, otherwise over its own tokens.
    """

    def __init__(self, runtime: Runtime, branches: list[LayersOfInput]):
        self.runtime, self.branches = runtime, branches
        self._described, self._has_norms = tuple([b.branch() for b in branches]), branches[0].norm is not None
        self._taken: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

        def wrap_layer(module: nn.Module, number: int) -> None:
            def column_forward(x: Tensor) -> Tensor:
                return self.output(number, x)

            wrap(module, column_forward, f"column-parallel tp {runtime.group.size}")

        for place, layer in enumerate(layer for branch in branches for layer in branch.layers):
            wrap_layer(layer.module, place)
        for branch in branches:
            if branch.norm is not None:

                def norm_later_forward(x: Tensor) -> Tensor:  # new for each norm: it refers to the forward it wraps
                    made = without_values(x, x.shape)  # a stand-in: the layers after the norm compute the norm itself
                    made.normed_later = x  # type: ignore[attr-defined]
                    return made

                wrap(branch.norm, norm_later_forward, f"computed with the layers behind it, tp {runtime.group.size}")

    def output(self, number: int, x: Tensor) -> Tensor:
        """Return the output of this layer for the input ``x``, or for the part that ``x`` stands in for."""
        x = behind(x)
        if self._has_norms:
            entered = getattr(x, "normed_later", None)
            if entered is None:
                raise UnsupportedError(
                    f"a layer behind {' and '.join(type(branch.norm).__name__ for branch in self.branches)}, which were"
                    " measured side by side, was given another tensor than its norm's output. Set layout.tp = 1."
                )
            x = entered
        if self._taken is not x or number not in self._outputs:
            tensors: list[Tensor | None] = []
            for branch in self.branches:
                held = (
                    [] if branch.norm is None else [local(p) for p in branch.norm._parameters.values() if p is not None]
                )
                group = self.runtime.group
                tensors += [functions.summing_gradients(p, group) for p in held] if branch.sums else held
                for layer in branch.layers:
                    tensors += layer.tensors(self.runtime)
            made = functions.column_parallel(x, self._described, tensors, self.runtime.sequence)
            self._taken, self._outputs = x, dict(enumerate(made))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._taken = None
        return output


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

    def row_forward(x: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")  # a call fewer for each layer
        assert weight is not None
        weight, bias = local(weight), None if bias is None else local(bias)
        if bias is not None and reduction.sums_bias:
            bias = functions.summing_gradients(bias, runtime.group)
        way = products_of(module, transposed, ROW)
        if reduction.defers:
            return collect_deferred(
                runtime, x, agreed_linear(x, weight, None, way, runtime.group), bias, begins=reduction.begins
            )
        others = runtime.deferred if reduction.takes_deferred else None
        runtime.deferred = None if reduction.takes_deferred else runtime.deferred
        return functions.row_parallel(x, weight, bias, way, runtime.sequence, others)

    wrap(module, row_forward, f"row-parallel tp {runtime.group.size}")


def collect_deferred(runtime: Runtime, x: Tensor, summand: Tensor, bias: Tensor | None, *, begins: bool) -> Tensor:
    """Leave a partial sum to the layer that reduces it; return zeros, or the bias, in its place (``Reduction``)."""
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

    forward = module.forward

    def container_forward(*args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Tensor] = {}
        if form.hidden and (runtime.sequence.cut or form.narrow):
            parts = runtime.group.size if form.narrow else 1
            made = runtime.stand_in(argument(args, kwargs, form.hidden[0]), parts)
            given |= dict.fromkeys(form.hidden, made)
        for shared in form.arguments:
            whole = argument(args, kwargs, shared.key)
            given[shared.key] = share_of(whole, shared, runtime.sequence.rows, runtime.group.rank, runtime.group.size)
        args, kwargs = with_arguments(args, kwargs, given)
        with counting_locally(numbers):
            return forward(*args, **kwargs)

    wrap(module, container_forward, f"this rank's share of tp {runtime.group.size}")


def norm_over_all_features(module: nn.Module, parts: tuple[FusedPart, ...], runtime: Runtime) -> None:
    """Gather the features of a norm's input, of which each rank has some; each rank keeps its own of the output."""
    (part,) = parts
    group = runtime.group
    (low, high), copies = ranges(parts, group.rank, group.size)[0], part.copies(group.size)

    forward = module.forward

    def gathered_norm_forward(x: Tensor) -> Tensor:
        return forward(functions.whole_features(x, copies, group))[..., low:high]

    wrap(module, gathered_norm_forward, f"gathers features over tp {runtime.group.size}")


def routers_of_parts(model: nn.Module, runtime: Runtime) -> None:
    """Wrap every router: each rank routes its own tokens, and sums over a whole sequence span the ranks.

    The padding in the last rank's part of a sequence is not routed.
    """

    def route_parts(router: Router) -> None:
        forward, sequence = router.forward, runtime.sequence

        def route_own_tokens(x: Tensor, routed: Tensor | None = None) -> Any:
            if routed is None and sequence.filled:
                routed = torch.ones((len(x), sequence.length(x.shape[1])), dtype=torch.bool, device=x.device)
            return forward(x, None if routed is None else own_share(routed, sequence.group.rank, sequence.group.size))

        router.across = runtime.group.sum
        wrap(router, route_own_tokens, f"routes its tokens of tp {runtime.group.size}")

    for module in model.modules():
        if isinstance(module, Router):
            route_parts(module)


# --- compute linear layers with adapters, whose own module runs on this rank's parts of the weights


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

        def wrap_module(module: nn.Module, number: int) -> None:
            forward = module.forward

            def gathered_input_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                return forward(self.whole(number, x), *args, **kwargs)

            wrap(module, gathered_input_forward, f"input gathered over tp {runtime.group.size}")

        for place, each in enumerate(modules):
            wrap_module(each, place)

    def whole(self, number: int, x: Tensor) -> Tensor:
        """Return the whole input of the module with this number, of which ``x`` is this rank's part."""
        x = behind(x)
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

    def partial_sum_forward(x: Tensor) -> Tensor:
        weight, bias = layer.tensors(runtime)
        if bias is not None:
            bias = functions.summing_gradients(bias, runtime.group) if sums_at_once else bias
            # every rank needs a gradient, or the sum over the ranks would wait for one
            bias = bias if runtime.group.rank == 0 else bias * 0
        return agreed_linear(x, weight, bias, layer.way, runtime.group)

    wrap(layer.module, partial_sum_forward, f"partial sums over tp {runtime.group.size}")


def reduce_behind(around: nn.Module, runtime: Runtime, reduction: Reduction) -> None:
    """Reduce the partial sums that the module around a row-parallel layer and its adapters returns."""
    forward = around.forward

    def reduced_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        summand = forward(x, *args, **kwargs)
        if reduction.defers:
            return collect_deferred(runtime, x, summand, None, begins=reduction.begins)
        others = runtime.deferred if reduction.takes_deferred else None
        runtime.deferred = None if reduction.takes_deferred else runtime.deferred
        whole = summand if others is None else summand + others.view(summand.shape)
        return functions.reduced(whole, runtime.sequence)

    wrap(around, reduced_forward, f"summed over tp {runtime.group.size}")


def refuse_idle(module: nn.Module, path: str) -> None:
    """Refuse calls of an adapter that was switched off when the model was cut: it was left whole."""

    def refused_forward(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{path} is an adapter that was switched off when the model was cut for tensor parallelism, so it was"
            f" left whole and cannot"
            f" be used now. Switch on the adapters that you want to use, all of them, before you lay out the model."
        )

    wrap(module, refused_forward, "switched off when the model was cut")
