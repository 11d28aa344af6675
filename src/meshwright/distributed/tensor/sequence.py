"""Describe how activations between blocks lie on the ranks of the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.distributed.exchange.ranks import RankGroup, share_of_sequence
from meshwright.distributed.step.deferred import DeferredGradients
from meshwright.distributed.torch_private import as_no_view

from .overlap import Overlap


@dataclass
class Sequence:
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
