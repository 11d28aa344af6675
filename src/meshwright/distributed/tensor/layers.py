"""Wrap the layers inside a block for one rank of a tensor-parallel group, with state that a model's modules share.

A wrapped forward computes with plain tensors, this rank's parts; outside forwards the parameters are DTensors.

The plan tells which gradients to sum. The sum is taken once for each optimizer step, in one message for each dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.parts import FusedPart, ranges
from meshwright.core.record import argument, recall, with_arguments, without_values, wrap
from meshwright.distributed.exchange.ranks import RankGroup, own_share
from meshwright.distributed.float8 import agreed
from meshwright.distributed.float8.products import Products, products_of
from meshwright.distributed.quantize.nf4 import QuantizedLinear
from meshwright.distributed.torch_private import local_part, spec_of
from meshwright.distributed.weights.parts_tensor import placed
from meshwright.distributed.weights.shards import pieces
from meshwright.introspection.structure.local_search import LocalForm, counting_locally, share_of
from meshwright.models.moe import Router
from meshwright.planning.float8.operand_parts import COLUMN, ROW, WHOLE, OperandParts

from . import functions
from .functions import TokenSequence
from .loss import VocabularyShard

# --- share state among the wrapped modules of one model, and give them plain local parameters


@dataclass
class LossRequest:
    """A request that the head compute a loss itself, in chunks, instead of logits.

    Attributes:
        labels: (rows, seq).
        chunks: number of chunks into which the tokens are cut.
        weights: (rows, seq) factors of the tokens' losses.
        result: the summed loss, after the model was called.
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
    _standing_for: list[tuple[Tensor, Tensor]] = field(default_factory=list)

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
        self._standing_for.append((made, part))
        return made

    def forget(self, made: Tensor | None) -> None:
        """Drop a stand-in that is no longer needed."""
        for number, (other, _) in enumerate(self._standing_for):
            if other is made:
                del self._standing_for[number]
                return

    def behind(self, x: Tensor) -> Tensor:
        """Return the tensor that a stand-in replaces, or ``x`` itself if it is no stand-in."""
        for made, part in self._standing_for:
            if made is x:
                return part
        return x


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


@dataclass(frozen=True)
class LocalView:
    """A parameter of which forwards see this rank's part as a plain tensor.

    Attributes:
        home: the module that has the parameter.
        summed_over: group over which its gradient is summed in the backward.
        gradient_factor: factor of its gradient.
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
            part = functions.scaled_gradient(part, self.gradient_factor)
        return part if self.summed_over is None else functions.summing_gradients(part, self.summed_over)


def use_local_parameters(module: nn.Module, views: Iterable[LocalView] | None = None) -> None:
    """Show this rank's parts of some parameters as plain tensors to every module while the module's forward runs.

    Parameters that an outer forward already replaced stay as they are. Parameters that FSDP has not gathered are left
    to the unit that gathers them: its forward runs inside this one.

    Args:
        views: the parameters, of this module or of modules inside; by default all of the module's own.
    """
    found = tuple(LocalView.of(module) if views is None else views)

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_with_local_parameters(*args: Any, **kwargs: Any) -> Any:
            held: list[tuple[dict[str, Any], str]] = []
            try:
                for view in found:
                    place, parameter = view.home.__dict__, view.home._parameters[view.name]
                    if (
                        parameter is not None
                        and view.key not in place
                        and (view.home is module or _is_gathered(parameter))
                    ):
                        place[view.key] = view.part(parameter)
                        held.append((place, view.key))
                return forward(*args, **kwargs)
            finally:
                for place, name in held:
                    place.pop(name, None)

        return forward_with_local_parameters

    wrap(module, make, "local parameters")


def _is_gathered(parameter: Tensor | None) -> bool:
    """Return whether a parameter is cut over no axis but the tensor axis."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1


# --- sum partial gradients over the tensor axis, for whole parameters and for parts that several ranks hold


@dataclass(frozen=True)
class Sums:
    """Parameters that several ranks hold.

    Attributes:
        whole: whole on every rank, with a partial gradient on each.
        copied: cut, but some parts lie on several ranks, with a partial gradient on each.
        alike: whole, with the same gradient on every rank. Their mean is taken: kernels that add up in no fixed order
            would let the ranks drift apart.
    """

    whole: list[nn.Parameter]
    copied: list[nn.Parameter]
    alike: list[nn.Parameter]


@contextmanager
def summing(sums: Sums, group: RankGroup) -> Iterator[None]:
    """Sum over ``group``, on exit, the gradients that backwards inside add.

    Gradients from before are put aside, and added afterwards.
    """
    before = [(parameter, parameter.grad) for parameter in (*sums.whole, *sums.copied, *sums.alike)]
    for parameter, _ in before:
        parameter.grad = None
    yield
    for parameter in sums.alike:
        if parameter.grad is not None:
            _local(parameter.grad).div_(group.size)
    places = [(_local(p.grad), 0, 1) for p in (*sums.whole, *sums.alike) if p.grad is not None]
    for parameter in sums.copied:
        if parameter.grad is not None:
            places += _copies(parameter.grad, group)
    _sum(places, group)
    for parameter, earlier in before:
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def summing_copies(x: Tensor, dim: int, parts: Sequence[FusedPart], group: RankGroup) -> Tensor:
    """Return a rank's part of a parameter cut along ``dim``, and sum the gradients of copied parts in the backward."""
    return _SummingCopies.apply(x, dim, parts, group)


class _SummingCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Sequence[FusedPart], group: RankGroup) -> Tensor:
        ctx.dim, ctx.parts, ctx.group = dim, parts, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        group = ctx.group
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        sizes = [high - low for low, high in ranges(ctx.parts, group.rank, group.size)]
        copies = [part.copies(group.size) for part in ctx.parts]
        views = zip(gradient.split(sizes, dim=ctx.dim), copies, strict=True)
        _sum([(view, group.rank // n, group.size // n) for view, n in views if n > 1], group)
        return gradient, None, None, None


def _local(gradient: Tensor) -> Tensor:
    return local_part(gradient)


def _copies(gradient: Tensor | None, group: RankGroup) -> list[tuple[Tensor, int, int]]:
    """Return (view, slot, number of slots) for each copied part; ranks with copies of the same part share a slot."""
    assert gradient is not None
    return [
        (piece.local, group.rank // piece.copies, group.size // piece.copies)
        for piece in pieces(gradient)
        if piece.copies > 1
    ]


def _sum(places: list[tuple[Tensor, int, int]], group: RankGroup) -> None:
    """Add up views over the ranks, in one message for each dtype; a view is added only to views in the same slot."""
    for dtype in dict.fromkeys(view.dtype for view, *_ in places):
        chosen = [entry for entry in places if entry[0].dtype == dtype]
        flat = torch.zeros(
            sum(view.numel() * slots for view, _, slots in chosen), dtype=dtype, device=chosen[0][0].device
        )
        rooms, start = [], 0
        for view, slot, slots in chosen:
            room = flat[start + slot * view.numel() : start + (slot + 1) * view.numel()].view(view.shape)
            room.copy_(view)
            rooms.append(room)
            start += view.numel() * slots
        group.sum(flat)
        for (view, *_), room in zip(chosen, rooms, strict=True):
            view.copy_(room)


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

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def row_forward(x: Tensor) -> Tensor:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            weight, bias = local(weight), None if bias is None else local(bias)
            if bias is not None and reduction.sums_bias:
                bias = functions.summing_gradients(bias, runtime.group)
            way = products_of(module, transposed, ROW)
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
