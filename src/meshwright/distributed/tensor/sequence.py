"""Describe how activations between blocks lie on the ranks of the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.distributed.exchange.ranks import RankGroup, share_of_sequence
from meshwright.distributed.step.deferred import DeferredGradients

from .overlap import Overlap


@dataclass
class Sequence:
    """One for each model.

    Attributes:
        group: the ranks.
        cut: each rank has its part of the sequence; else all have all of it.
        regather: keep only that part for backward.
        overlap: computes products together with the messages beside them; None: one after the other.
        deferred: takes the weight gradients that a pipeline puts off.
        rows: of the batch in the forward that runs.
        filled: tokens by which the last rank's part of a row is filled up.

    The length itself is read off the tensors: as a number that stands here it would be a constant to torch.compile,
    and each new one a compilation.
    """

    group: RankGroup
    cut: bool = True
    regather: bool = True
    overlap: Overlap | None = None
    deferred: DeferredGradients | None = None
    rows: int = 0
    filled: int = 0

    def begin(self, rows: int, length: int) -> None:
        """A forward begins, of so many rows and tokens in each."""
        self.rows, self.filled = rows, -length % self.group.size

    def shape_of(self, x: Tensor) -> tuple[int | None, int]:
        """Return what a backward must know of the forward that ``x`` is from.

        The rows only where the shape of ``x`` does not say them.
        """
        return self.rows if x.dim() == 2 else None, self.filled

    def restore(self, shape: tuple[int | None, int]) -> None:
        rows, self.filled = shape
        if rows is not None:
            self.rows = rows

    def length(self, share: int) -> int:
        """Return the length of the whole sequence, from that of a rank's part."""
        return share * self.group.size - self.filled

    def own_shape(self, x: Tensor) -> tuple[int, ...]:
        """Leading dims of this rank's part of what has the whole sequence: (rows, share) or (rows · share,)."""
        length = x.shape[1] if x.dim() == 3 else x.shape[0] // self.rows
        share = share_of_sequence(length, self.group.size) if self.cut else length
        return (x.shape[0], share) if x.dim() == 3 else (self.rows * share,)

    def whole(self, x: Tensor) -> Tensor:
        """Return (rows, share, features), or (rows · share, features) → the same with the whole sequence."""
        if not self.cut:
            return x
        by_row = x if x.dim() == 3 else x.view(self.rows, -1, x.shape[-1])
        gathered = self.group.gather(by_row, self.length(by_row.shape[1]))
        return gathered if x.dim() == 3 else gathered.reshape(-1, x.shape[-1])

    def reduced(self, x: Tensor) -> Tensor:
        """Summands with the whole sequence → the sum, this rank's part of it where the sequence is cut."""
        if not self.cut:
            return self.group.sum(x.contiguous())
        mine = self.group.scatter(x if x.dim() == 3 else x.reshape(self.rows, -1, x.shape[-1]))
        # a view could not be changed in place
        return mine if x.dim() == 3 else torch.ops.aten._unsafe_view(mine, (-1, x.shape[-1]))

    def _overlapping(self, x: Tensor) -> Overlap | None:
        """Rows that do not divide must be filled up or cut off between message and product.

        Flat ones lie otherwise than the ranks.
        """
        return self.overlap if self.cut and not self.filled and x.dim() == 3 else None

    def whole_and_products(self, x: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return ``whole``, and its product with each matrix (features, others)."""
        if (overlap := self._overlapping(x)) is not None:
            return overlap.gather_products(x, matrices)
        whole = self.whole(x)
        return whole, [whole @ matrix for matrix in matrices]

    def reduced_product(self, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return ``reduced`` of the sum of products x @ matrix, each x with the whole sequence."""
        x = factors[0][0]
        if (overlap := self._overlapping(x)) is not None:
            if len(factors) > 1:  # a sum of products is the product of what lies side by side
                return overlap.product_scatter(
                    torch.cat([x for x, _ in factors], dim=-1), torch.cat([matrix for _, matrix in factors])
                )
            return overlap.product_scatter(*factors[0])
        total = x @ factors[0][1]
        for x, matrix in factors[1:]:
            total.add_(x @ matrix)
        return self.reduced(total)
