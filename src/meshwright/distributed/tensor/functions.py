"""Define the differentiable steps of tensor and sequence parallelism, and how activations lie on the ranks.

torch's fused operators ("async TP" in torchtitan) read the other ranks' memory over NVLink while they multiply. The
result is the same as of the message and the product one after the other.

These are Megatron-LM's operators (arXiv 1909.08053), with the sequence cut between them (arXiv 2205.05198): between
blocks a rank holds its part of the sequence; column-parallel layers gather it, row-parallel layers reduce and scatter.
Only the rank's part of a gathered tensor is saved for backward, and gathered again there (selective recomputation in
that paper).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.devices import CUDA, local_device
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.exchange import RankGroup, own_share, share_of_sequence
from meshwright.distributed.float8 import agreed
from meshwright.distributed.float8.products import OWN, Largest, Products
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
    """Return torch's operators. Collective: the ranks map each other's memory.

    Raises:
        UnsupportedError: the ranks cannot map each other's memory.
    """
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
        """Gather the tokens of all ranks, and return them and their product with each matrix.

        All products share one message.
        """
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


def column_parallel(
    x: Tensor, layers: list[tuple[Tensor, Tensor | None, Products]], sequence: TokenSequence
) -> tuple[Tensor, ...]:
    """Compute several column-parallel linear layers of one input.

    Args:
        x: (rows, share, features), this rank's part of the sequence (all of it if the sequence is not cut).
        layers: for each layer this rank's weight and bias, and how to multiply with them.

    Returns:
        For each layer (rows, length, own output features). The input's gradient is summed over the ranks.
    """
    tensors = [tensor for weight, bias, _ in layers for tensor in (weight, bias)]
    return _ColumnParallel.apply(x, sequence, sequence.shape_of(x), tuple([layer[2] for layer in layers]), *tensors)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sequence: TokenSequence,
        shape: tuple[int | None, int],
        ways: tuple[Products, ...],
        *tensors: Tensor | None,
    ):
        weights: list[Tensor] = list(tensors[::2])  # type: ignore[arg-type]
        largest = agreed.before_outputs(x, weights, ways, sequence.group)
        if sequence.overlap is None:
            whole = sequence.whole(x)
            layers = zip(weights, tensors[1::2], ways, largest, strict=True)
            outputs = tuple([way.output(whole, w, b, at) for w, b, way, at in layers])
        else:
            whole, products = sequence.whole_and_products(
                x, [way.matrix(w).T for w, way in zip(weights, ways, strict=True)]
            )
            outputs = tuple(
                made if b is None else made.add_(b) for made, b in zip(products, tensors[1::2], strict=True)
            )
        ctx.sequence, ctx.shape, ctx.ways = sequence, shape, ways
        ctx.tracked = weights if sequence.deferred is not None else ()
        ctx.kept_part = sequence.cut and sequence.regather
        ctx.save_for_backward(x if ctx.kept_part else whole, *weights, *agreed.to_save(largest))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        kept, *rest = ctx.saved_tensors
        weights, earlier = rest[: len(ctx.ways)], agreed.saved(rest[len(ctx.ways) :], len(ctx.ways))
        sequence = ctx.sequence
        sequence.restore(ctx.shape)
        whole = sequence.whole(kept) if ctx.kept_part and any(ctx.needs_input_grad[4:]) else kept
        grad_x: Tensor | None = None
        overlaps = sequence.overlap is not None and ctx.needs_input_grad[0]
        if overlaps:
            ways = zip(grad_outputs, weights, ctx.ways, strict=True)
            grad_x = sequence.reduced_product([(gradient, way.matrix(weight)) for gradient, weight, way in ways])
        asked = [ctx.needs_input_grad[0] or weight for weight in ctx.needs_input_grad[4::2]]
        largest = agreed.before_gradients(grad_outputs, ctx.ways, earlier, asked, sequence.group)
        found: list[Tensor | None] = []
        for i, (gradient, weight, way, at) in enumerate(zip(grad_outputs, weights, ctx.ways, largest, strict=True)):
            if ctx.needs_input_grad[0] and not overlaps:
                back = way.of_input(gradient, weight, at)
                grad_x = back if grad_x is None else grad_x.add_(back)
            found.append(now_or_later(ctx, i, gradient, whole, way, at) if ctx.needs_input_grad[4 + 2 * i] else None)
            found.append(gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[5 + 2 * i] else None)
        if grad_x is not None and not overlaps:
            grad_x = sequence.reduced(grad_x)
        return grad_x, None, None, None, *found


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, way: Products, sequence: TokenSequence, others: Tensor | None = None
) -> Tensor:
    """Compute a linear layer of which each rank has some input features, and reduce its partial sums.

    Args:
        x: (rows, length, own input features).
        weight: this rank's part of the weight.
        bias: the whole bias, added once.
        way: how to multiply.
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
        (largest,) = agreed.before_outputs(x, [weight], [way], sequence.group)
        ctx.save_for_backward(x, weight, *agreed.to_save([largest]))
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
        (largest,) = agreed.saved(rest, 1)
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
        return (
            grad_x,
            grad_weight,
            grad_bias,
            whole.view(ctx.others) if ctx.needs_input_grad[3] else None,
            None,
            None,
            None,
        )


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
    return _Gathered.apply(x, sequence, sequence.shape_of(x))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: TokenSequence, shape: tuple[int | None, int]) -> Tensor:
        ctx.sequence, ctx.shape = sequence, shape
        return sequence.whole(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        sequence = ctx.sequence
        sequence.restore(ctx.shape)
        return sequence.reduced(gradient if sequence.cut else gradient.clone()), None, None  # reduced in place


def gathered_alike(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Gather (rows, share, features) to (rows, length, features), with which all ranks then compute the same.

    Each rank keeps its part of the gradient.
    """
    return _GatheredAlike.apply(x, sequence)


class _GatheredAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: TokenSequence) -> Tensor:
        ctx.group = sequence.group
        return sequence.whole(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return own_share(gradient, ctx.group.rank, ctx.group.size), None


def own_part(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Take this rank's part of the sequence from (rows, length, features), which is equal on all ranks.

    The gradient is gathered from all ranks.
    """
    return _OwnPart.apply(x, sequence)


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: TokenSequence) -> Tensor:
        ctx.sequence, ctx.length = sequence, x.shape[1]
        return own_share(x, sequence.group.rank, sequence.group.size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return ctx.sequence.group.gather(gradient, ctx.length), None


def summed_part(x: Tensor, sequence: TokenSequence) -> Tensor:
    """Reduce partial sums (rows, length, features) and scatter the sum along the sequence.

    The partial sum of every rank gets the whole gradient.
    """
    return _SummedPart.apply(x, sequence)


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: TokenSequence) -> Tensor:
        ctx.sequence, ctx.length = sequence, x.shape[1]
        return sequence.group.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return ctx.sequence.group.gather(gradient, ctx.length), None


def summed(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks, which then all compute the same: the gradient is passed on unchanged."""
    return _Summed.apply(x, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        return group.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return gradient, None


def summing_gradients(x: Tensor, group: RankGroup) -> Tensor:
    """Return ``x``, which all ranks hold alike and use differently; its gradient is summed over them."""
    return _SummingGradients.apply(x, group)


class _SummingGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return ctx.group.sum(gradient.clone(memory_format=torch.contiguous_format)), None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; its gradient is multiplied by ``factor``."""
    return _ScaledGradient.apply(x, factor)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return grad_outputs[0] * ctx.factor, None


def whole_features(x: Tensor, copies: int, group: RankGroup) -> Tensor:
    """Gather the features of all ranks, (…, n) → (…, n · size / copies); ``copies`` adjacent ranks hold the same.

    The gradients of the ranks are summed, and each rank keeps its part.
    """
    return _WholeFeatures.apply(x, copies, group)


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, group: RankGroup) -> Tensor:
        ctx.copies, ctx.group = copies, group
        return torch.cat(group.gather_features(x)[::copies].unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        group = ctx.group
        total = group.sum(gradient.clone(memory_format=torch.contiguous_format))
        return total.chunk(group.size // ctx.copies, dim=-1)[group.rank // ctx.copies] / ctx.copies, None, None


def whole_vocabulary(own: Tensor, size: int, group: RankGroup) -> Tensor:
    """Gather the features (…, n) of all ranks, torch's chunks of ``size``; then all ranks compute the same."""
    return _WholeVocabulary.apply(own, size, group)


class _WholeVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, size: int, group: RankGroup) -> Tensor:
        share = -(-size // group.size)
        ctx.first, ctx.size = min(group.rank * share, size), own.shape[-1]
        filled = F.pad(own, (0, share - own.shape[-1]))
        whole = torch.cat(group.gather_features(filled).unbind(), dim=-1)
        # a copy, since a view of an autograd function's output cannot be changed in place
        return whole if whole.shape[-1] == size else whole[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        return gradient[..., ctx.first : ctx.first + ctx.size].contiguous(), None, None
