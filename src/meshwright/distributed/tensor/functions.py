"""Define the differentiable steps of tensor and sequence parallelism, and how activations lie on the ranks.

These are Megatron-LM's operators (arXiv 1909.08053), with the sequence cut between them (arXiv 2205.05198): between
blocks a rank holds its part of the sequence; column-parallel layers gather it, row-parallel layers reduce and scatter.
Only the rank's part of a gathered tensor is saved for backward, and gathered again there. torch's fused operators
("async TP") read the other ranks' memory while they multiply, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.devices import CUDA, local_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart, ranges
from meshwright.distributed.exchange import RankGroup, linear_map, own_share, share_of_sequence
from meshwright.distributed.products import (
    OWN,
    Largest,
    Products,
    agree_for_gradients,
    agree_for_outputs,
    saved,
    to_save,
)
from meshwright.distributed.step.deferred import DeferredGradients
from meshwright.distributed.torch_private import as_no_view, map_memory

# --- overlap matrix products with the messages before or after them, through symmetric memory

TOKENS = 1
"""The dim of (rows, tokens, features) along which ranks gather and scatter."""


@dataclass(frozen=True)
class Operators:
    """torch's fused operators, or replacements with the same signature.

    Attributes:
        gather_products: (part, matrices, dim, group name, return_A=) → (whole, its product with each matrix).
        product_scatter: (x, matrix, "sum", dim, group name) → this rank's part of the sum of ``x @ matrix``.
    """

    gather_products: Callable[..., Any]
    product_scatter: Callable[..., Tensor]


def symmetric_memory(group: dist.ProcessGroup) -> Operators:
    """Return torch's operators (collective: the ranks map each other's memory), or raise UnsupportedError."""
    way = "Set techniques.async_tensor_parallel = false: the numbers are the same."
    if local_device() != CUDA:
        raise UnsupportedError(f"techniques.async_tensor_parallel needs CUDA, which is not available. {way}")
    try:
        map_memory(group)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"techniques.async_tensor_parallel: the {dist.get_world_size(group)} ranks of layout.tp cannot map each"
            f" other's memory; for that they must be joined by NVLink ({type(error).__name__}: {error}). {way}"
        ) from error
    return Operators(torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)


class Overlap:
    """Computes products of activations (rows, tokens, features) with matrices (features, others) over a group."""

    def __init__(self, group: dist.ProcessGroup):
        self._operators, self._name = symmetric_memory(group), group.group_name

    def gather_products(self, part: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gather the tokens of all ranks in one message, and return them and their product with each matrix."""
        whole, products = self._operators.gather_products(part, matrices, TOKENS, self._name, return_A=True)
        return whole.contiguous(), [product.contiguous() for product in products]  # models take views

    def product_scatter(self, whole: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks of (rows, tokens, features) @ (features, others)."""
        return self._operators.product_scatter(whole, matrix, "sum", TOKENS, self._name).contiguous()


# --- describe how activations between blocks lie on the ranks of the tensor axis


@dataclass
class TokenSequence:
    """The layout of one model's activations along the sequence.

    The length is not stored but read off the tensors: a stored number would be a constant to torch.compile, and each
    new length a compilation.

    Attributes:
        group: the ranks of the tensor axis.
        cut: whether each rank has its part of the sequence; else every rank has all of it.
        regather: save only a rank's part for backward, and gather it again.
        overlap: computes products together with the messages beside them; None: one after the other.
        deferred: collects the weight gradients that a pipeline defers.
        rows: number of rows in the batch of the current forward.
        filled: number of padding tokens at the end of the last rank's part of a row.
    """

    group: RankGroup
    cut: bool = True
    regather: bool = True
    overlap: Overlap | None = None
    deferred: DeferredGradients | None = None
    rows: int = 0
    filled: int = 0

    def begin(self, rows: int, length: int) -> None:
        """Begin a forward of ``rows`` rows with ``length`` tokens each."""
        self.rows, self.filled = rows, -length % self.group.size

    def shape_of(self, x: Tensor) -> tuple[int | None, int]:
        """Return the sizes that the backward of ``x`` must restore.

        The number of rows is included only if the shape of ``x`` does not give it.
        """
        return self.rows if x.dim() == 2 else None, self.filled

    def restore(self, shape: tuple[int | None, int]) -> None:
        rows, self.filled = shape
        if rows is not None:
            self.rows = rows

    def length(self, share: int) -> int:
        """Return the length of the whole sequence, from the length of a rank's part."""
        return share * self.group.size - self.filled

    def own_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the leading dims of this rank's part of ``x``: (rows, share) or (rows · share,)."""
        length = x.shape[1] if x.dim() == 3 else x.shape[0] // self.rows
        share = share_of_sequence(length, self.group.size) if self.cut else length
        return (x.shape[0], share) if x.dim() == 3 else (self.rows * share,)

    def whole(self, x: Tensor) -> Tensor:
        """Gather the whole sequence from (rows, share, features) or (rows · share, features)."""
        if not self.cut:
            return x
        by_row = x if x.dim() == 3 else x.view(self.rows, -1, x.shape[-1])
        gathered = self.group.gather(by_row, self.length(by_row.shape[1]))
        return gathered if x.dim() == 3 else gathered.reshape(-1, x.shape[-1])

    def reduced(self, x: Tensor) -> Tensor:
        """Sum partial sums of the whole sequence; return this rank's part of the sum if the sequence is cut."""
        if not self.cut:
            return self.group.sum(x.contiguous())
        mine = self.group.scatter(x if x.dim() == 3 else x.reshape(self.rows, -1, x.shape[-1]))
        # a view could not be changed in place
        return mine if x.dim() == 3 else as_no_view(mine, (-1, x.shape[-1]))

    def _overlapping(self, x: Tensor) -> Overlap | None:
        """Return the overlap if it applies: with padding, or with flat rows, the fused operators do not."""
        return self.overlap if self.cut and not self.filled and x.dim() == 3 else None

    def whole_and_products(self, x: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gather ``x`` as ``whole`` does, and return the product with each matrix (features, others) too."""
        if (overlap := self._overlapping(x)) is not None:
            return overlap.gather_products(x, matrices)
        whole = self.whole(x)
        return whole, [whole @ matrix for matrix in matrices]

    def reduced_product(self, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Reduce, as ``reduced`` does, the sum of products x @ matrix, where each x has the whole sequence."""
        x = factors[0][0]
        if (overlap := self._overlapping(x)) is not None:
            if len(factors) > 1:  # a sum of products is one product of the concatenated factors
                return overlap.product_scatter(
                    torch.cat([x for x, _ in factors], dim=-1), torch.cat([matrix for _, matrix in factors])
                )
            return overlap.product_scatter(*factors[0])
        total = x @ factors[0][1]
        for x, matrix in factors[1:]:
            total.add_(x @ matrix)
        return self.reduced(total)


# --- define the differentiable steps of tensor and sequence parallelism

Normalise = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Type of a norm's forward: (input, parameters) → output."""


@dataclass(frozen=True)
class Branch:
    """Column-parallel layers of one input, or of a norm of it that has so many parameters."""

    ways: tuple[Products, ...]
    norm: Normalise | None = None
    parameters: int = 0


def _dealt(branches: tuple[Branch, ...]) -> Iterator[tuple[Branch, int, int]]:
    """Yield each branch, with the offsets of its norm's parameters and of its layers' weights among all tensors."""
    start = 0
    for branch in branches:
        first = start + branch.parameters
        yield branch, start, first
        start = first + 2 * len(branch.ways)


def column_parallel(
    x: Tensor, branches: tuple[Branch, ...], tensors: Sequence[Tensor | None], sequence: TokenSequence
) -> tuple[Tensor, ...]:
    """Compute several column-parallel linear layers of one input, or of several norms of it.

    Args:
        x: (rows, share, features), this rank's part of the sequence (all of it if the sequence is not cut).
        tensors: for each branch the norm's parameters, then this rank's weight and bias of each layer.

    Returns:
        For each layer (rows, length, own output features). The input's gradient is summed over the ranks; those of the
        norms' parameters are partial.
    """
    return _ColumnParallel.apply(x, sequence, sequence.shape_of(x), branches, *tensors)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sequence: TokenSequence,
        shape: tuple[int | None, int],
        branches: tuple[Branch, ...],
        *tensors: Tensor | None,
    ):
        given: Any = tensors
        ways = [way for branch in branches for way in branch.ways]
        weights = [given[first + 2 * i] for branch, _, first in _dealt(branches) for i in range(len(branch.ways))]
        largest = agree_for_outputs(x, weights, ways, sequence.group)
        if sequence.overlap is not None and branches[0].norm is None:
            matrices = [way.matrix(w).T for w, way in zip(weights, ways, strict=True)]
            whole, products = sequence.whole_and_products(x, matrices)
            outputs = [made if b is None else made.add_(b) for made, b in zip(products, tensors[1::2], strict=True)]
        else:
            whole, outputs, of_layers = sequence.whole(x), [], iter(largest)
            for branch, start, first in _dealt(branches):
                normed = whole if branch.norm is None else branch.norm(whole, given[start:first])
                for i, way in enumerate(branch.ways):
                    place = first + 2 * i
                    outputs.append(way.output(normed, given[place], given[place + 1], next(of_layers)))
        ctx.sequence, ctx.shape, ctx.branches, ctx.tensors = sequence, shape, branches, len(tensors)
        ctx.tracked = tensors if sequence.deferred is not None else ()
        ctx.kept_part = sequence.cut and sequence.regather
        ctx.save_for_backward(x if ctx.kept_part else whole, *tensors, *to_save(largest))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        kept, *rest = ctx.saved_tensors
        needs_x, needed, sequence, branches = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[4:],
            ctx.sequence,
            ctx.branches,
        )
        ways = [way for branch in branches for way in branch.ways]
        earlier, tensors = saved(rest[ctx.tensors :], len(ways)), rest[: ctx.tensors]
        sequence.restore(ctx.shape)
        whole = sequence.whole(kept) if ctx.kept_part and (any(needed) or branches[0].norm is not None) else kept
        overlaps = sequence.overlap is not None and branches[0].norm is None and needs_x
        grad_x: Tensor | None = None
        if overlaps:
            pairs = zip(grad_outputs, tensors[::2], ways, strict=True)
            grad_x = sequence.reduced_product([(gradient, way.matrix(weight)) for gradient, weight, way in pairs])
        asked: list[bool] = []
        for branch, start, first in _dealt(branches):
            flows = needs_x or any(needed[start:first])
            asked += [flows or needed[first + 2 * i] for i in range(len(branch.ways))]
        of_layers = iter(agree_for_gradients(grad_outputs, ways, earlier, asked, sequence.group))
        found: list[Tensor | None] = [None] * len(tensors)
        gradients = iter(grad_outputs)
        for branch, start, first in _dealt(branches):
            normed, inputs = whole, []
            if branch.norm is not None:
                inputs = [whole.detach().requires_grad_(needs_x)]
                inputs += [p.detach().requires_grad_(needed[start + i]) for i, p in enumerate(tensors[start:first])]
                with torch.enable_grad():
                    normed = branch.norm(inputs[0], inputs[1:])
            flows = (needs_x or any(needed[start:first])) and not overlaps
            back: Tensor | None = None
            for i, way in enumerate(branch.ways):
                place, gradient, largest = first + 2 * i, next(gradients), next(of_layers)
                if flows:
                    summand = way.of_input(gradient, tensors[place], largest)
                    back = summand if back is None else back.add_(summand)
                if needed[place]:
                    found[place] = now_or_later(ctx, place, gradient, normed.detach(), way, largest)
                if needed[place + 1]:
                    found[place + 1] = gradient.flatten(0, -2).sum(0)
            wanted = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
            if wanted:
                of_norm = torch.autograd.grad(normed, [inputs[i] for i in wanted], back, allow_unused=True)
                back = of_norm[0] if needs_x else None
                for i, gradient in zip(wanted, of_norm, strict=True):
                    if i:
                        found[start + i - 1] = gradient
            if back is not None and not overlaps:
                grad_x = back if grad_x is None else grad_x + back
        if grad_x is not None and not overlaps:
            grad_x = sequence.reduced(grad_x)
        return grad_x, None, None, None, *found


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, way: Products, sequence: TokenSequence, others: Tensor | None = None
) -> Tensor:
    """Compute a linear layer of which each rank has some input features, and reduce its partial sums.

    Args:
        x: (rows, length, own input features).
        bias: the whole bias, added once.
        others: further partial sums to reduce in the same message, (rows, length, features).

    Returns:
        (rows, share, features), or (rows, length, features) if the sequence is not cut.
    """
    return _RowParallel.apply(x, weight, bias, others, way, sequence, sequence.shape_of(x))


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        others: Tensor | None,
        way: Products,
        sequence: TokenSequence,
        shape: tuple[int | None, int],
    ) -> Tensor:
        (largest,) = agree_for_outputs(x, [weight], [way], sequence.group)
        ctx.save_for_backward(x, weight, *to_save([largest]))
        ctx.sequence, ctx.shape, ctx.way = sequence, shape, way
        ctx.tracked = (weight,) if sequence.deferred is not None else ()
        ctx.others = None if others is None else others.shape
        if others is None and sequence.overlap is not None:
            output = sequence.reduced_product([(x, way.matrix(weight).T)])
        else:
            summand = way.output(x, weight, None, largest)
            if others is not None:
                summand += others.view(summand.shape)
            output = sequence.reduced(summand)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        x, weight, *rest = ctx.saved_tensors
        (largest,) = saved(rest, 1)
        sequence = ctx.sequence
        sequence.restore(ctx.shape)
        grad_x: Tensor | None = None
        if sequence.overlap is not None and ctx.needs_input_grad[0]:
            whole, (grad_x,) = sequence.whole_and_products(gradient, [ctx.way.matrix(weight)])
        else:
            whole = sequence.whole(gradient)
            grad_x = ctx.way.of_input(whole, weight, largest) if ctx.needs_input_grad[0] else None
        grad_weight = now_or_later(ctx, 0, whole, x, ctx.way, largest) if ctx.needs_input_grad[1] else None
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad_others = whole.view(ctx.others) if ctx.needs_input_grad[3] else None
        return grad_x, grad_weight, grad_bias, grad_others, None, None, None


def now_or_later(
    ctx: Any, number: int, gradient: Tensor, x: Tensor, way: Products, largest: Largest = OWN
) -> Tensor | None:
    """Return the gradient of a layer's weight, or None if a pipeline defers it.

    Args:
        ctx: context of an autograd node, with ``sequence`` and, as ``tracked``, the weights that it was given: a saved
            tensor may come back as another object.
        number: index of the weight among the tracked ones.
    """
    deferred = ctx.sequence.deferred
    if deferred is None or not deferred.is_open:
        return way.of_weight(gradient, x, largest)
    weight = ctx.tracked[number]
    deferred.put_off(lambda: torch.autograd.backward(weight, way.of_weight(gradient, x, largest)))
    return None


def gathered(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Gather (rows, share, features) to (rows, length, features), of which each rank then uses a part.

    The gradients of the ranks are summed and scattered.
    """
    shape = sequence.shape_of(x)

    def back(gradient: Tensor) -> Tensor:
        sequence.restore(shape)
        return sequence.reduced(gradient if sequence.cut else gradient.clone())  # reduced in place

    return linear_map(x, sequence.whole, back)


def reduced(x: Tensor, sequence: TokenSequence) -> Tensor:
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


def gathered_alike(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Gather (rows, share, features) to (rows, length, features), with which all ranks then compute the same.

    Each rank keeps its part of the gradient.
    """
    group = sequence.group
    return linear_map(x, sequence.whole, lambda gradient: own_share(gradient, group.rank, group.size))


def own_part(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Take this rank's part of the sequence from (rows, length, features), which is equal on all ranks.

    The gradient is gathered from all ranks.
    """
    group, length = sequence.group, x.shape[1]
    return linear_map(x, lambda x: own_share(x, group.rank, group.size), lambda g: group.gather(g, length))


def summed_part(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Reduce partial sums (rows, length, features) and scatter the sum along the sequence.

    The partial sum of every rank gets the whole gradient.
    """
    group, length = sequence.group, x.shape[1]
    return linear_map(x, group.scatter, lambda gradient: group.gather(gradient, length))


def summed(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks, which then all compute the same: the gradient is passed on unchanged."""
    return linear_map(x, lambda x: group.sum(x.clone()), lambda gradient: gradient)


def summing_gradients(x: Tensor, group: RankGroup) -> Tensor:
    """Return ``x``, which all ranks hold alike and use differently; its gradient is summed over them."""
    return linear_map(x, lambda x: x.view_as(x), lambda g: group.sum(g.clone(memory_format=torch.contiguous_format)))


def summing_copies(x: Tensor, dim: int, parts: Sequence[FusedPart], group: RankGroup) -> Tensor:
    """Return a rank's part of a parameter cut along ``dim``; gradients of parts that several ranks hold are summed."""

    def back(gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        sizes = [high - low for low, high in ranges(parts, group.rank, group.size)]
        copies = [part.copies(group.size) for part in parts]
        views = zip(gradient.split(sizes, dim=dim), copies, strict=True)
        add_up([(view, group.rank // n, group.size // n) for view, n in views if n > 1], group)
        return gradient

    return linear_map(x, lambda x: x.view_as(x), back)


def add_up(places: list[tuple[Tensor, int, int]], group: RankGroup) -> None:
    """Sum (view, slot, number of slots) over the ranks, in one message for each dtype; in place.

    A view is added only to views in the same slot.
    """
    for dtype in dict.fromkeys(view.dtype for view, *_ in places):
        chosen = [entry for entry in places if entry[0].dtype == dtype]
        flat = chosen[0][0].new_zeros(sum(view.numel() * slots for view, _, slots in chosen))
        rooms, start = [], 0
        for view, slot, slots in chosen:
            room = flat[start + slot * view.numel() : start + (slot + 1) * view.numel()].view(view.shape)
            room.copy_(view)
            rooms.append(room)
            start += view.numel() * slots
        group.sum(flat)
        for (view, *_), room in zip(chosen, rooms, strict=True):
            view.copy_(room)


def whole_features(x: Tensor, copies: int, group: RankGroup) -> Tensor:
    """Gather the features of all ranks, (…, n) → (…, n · size / copies); ``copies`` adjacent ranks hold the same.

    The gradients of the ranks are summed, and each rank keeps its part.
    """

    def back(gradient: Tensor) -> Tensor:
        total = group.sum(gradient.clone(memory_format=torch.contiguous_format))
        return total.chunk(group.size // copies, dim=-1)[group.rank // copies] / copies

    return linear_map(x, lambda x: torch.cat(group.gather_features(x)[::copies].unbind(), dim=-1), back)


def whole_vocabulary(own: Tensor, size: int, group: RankGroup) -> Tensor:
    """Gather the features (…, n) of all ranks, torch's chunks of ``size``; then all ranks compute the same."""
    share, features = -(-size // group.size), own.shape[-1]
    first = min(group.rank * share, size)

    def gather(own: Tensor) -> Tensor:
        parts = group.gather_features(F.pad(own, (0, share - features)))
        whole = torch.cat(parts.unbind(), dim=-1)
        # a copy, since a view of an autograd function's output cannot be changed in place
        return whole if whole.shape[-1] == size else whole[..., :size].contiguous()

    return linear_map(own, gather, lambda gradient: gradient[..., first : first + features].contiguous())
