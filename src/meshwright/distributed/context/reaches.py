"""Find the reach of masks, once for each mask and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.core.devices import is_accelerator, to_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import by_values
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import not_counted
from meshwright.introspection.mixing.arithmetic import raise_unless
from meshwright.introspection.mixing.flex import replaced
from meshwright.introspection.mixing.masks import MaskFunction
from meshwright.introspection.mixing.reach import KeyRanges, RowMask, fingerprint, is_reach, search

from .rows import CutRows, kept_on

CPU = torch.device("cpu")
Expect = Callable[[Tensor, Exception], None]
"""Raises an error, at once or later, unless a bool of no dims is true."""


class Reaches:
    """The reach of each mask that a model has made, or that there is none.

    A function of places may be anything, so that its values are compared with the intervals that were found, by each
    rank for a part of the queries; the ranks then agree, with a message of one number. A function that is made of the
    same code and the same numbers is not looked at again.
    """

    def __init__(self, group: RankGroup):
        self._group = group
        self._known: dict[Any, KeyRanges | None] = {}

    @by_values
    def of(self, mask: RowMask, rows: CutRows, count: int, device: torch.device = CPU) -> KeyRanges | None:
        """Return the reach of all tokens of ``count`` rows, by places; None where a query's keys are no interval.

        Args:
            device: where the mask is used; tensors that it closes over may lie there.
        """
        if mask not in rows.memo:

            def known(function: MaskFunction, length: int) -> KeyRanges | None:
                return self._of(function, length, count, device, is_known=mask.is_known)

            rows.memo[mask] = mask.reach(rows.length, known)
        return rows.memo[mask]

    def _of(
        self, function: MaskFunction, length: int, count: int, device: torch.device, *, is_known: bool
    ) -> KeyRanges | None:
        code = fingerprint(function)
        key = (code, length, count)
        if code is not None and key in self._known:
            return self._known[key]
        function, device = _readable(function, device)
        found = search(function, length, count, device)
        if not is_known:
            mine = torch.arange(self._group.rank, length, self._group.size, device=device)[None]
            is_right = found is not None and is_reach(function, found, mine, length, count)
            wrong = torch.tensor([not is_right], dtype=torch.int64, device=agree.word_device())
            with not_counted():
                found = None if bool(self._group.largest(wrong)) else found
        if found is not None:
            found = KeyRanges(found.lower.cpu(), found.upper.cpu())
        if code is not None:
            self._known[key] = found
        return found


def _readable(function: MaskFunction, device: torch.device) -> tuple[MaskFunction, torch.device]:
    """Return a mask that can be asked on the host, with the tensors brought there that it closes over.

    Returns:
        The mask, and the device of its places: the given one if it reaches tensors there by other names.
    """
    if not is_accelerator(device):
        return function, device
    brought = replaced(function, lambda held: held.cpu() if is_accelerator(held.device) else held)
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
    try:
        answer = brought(first, first[0, 0, 0, 0], first, first)
    except RuntimeError:  # tensors of two devices
        return function, device
    return (brought, CPU) if answer.device == CPU else (function, device)


@by_values
def on_device(mask: RowMask, rows: CutRows, device: torch.device) -> RowMask:
    """Return a mask with its tensors on a device, to be evaluated there."""
    if not is_accelerator(device):
        return mask
    key = (mask, device)
    if key not in rows.memo:
        function = replaced(mask.function, lambda held: kept_on(held, device) if held.dim() else held)
        tensors = (mask.positions, mask.segments, mask.padding)
        positions, segments, padding = (None if x is None else kept_on(x, device) for x in tensors)
        rows.memo[key] = RowMask(function, positions, segments, padding)
    return rows.memo[key]


@by_values
def of_whole_rows(function: MaskFunction, rows: CutRows, expect: Expect = raise_unless) -> RowMask:
    """Return a mask by places in whole rows, of a function that a model has made for this rank's tokens.

    Of tensors that it closes over, the batch's documents are known, and are taken from whole rows.

    Args:
        expect: raises an error, at once or later, unless such a tensor holds the documents.

    Raises:
        UnsupportedError: it closes over another tensor with one number for each of this rank's tokens.
    """
    key = (function, "whole rows")
    if key not in rows.memo:
        rows.memo[key] = RowMask(_of_each_pair(replaced(function, lambda held: _whole(held, rows, expect))))
    return rows.memo[key]


def _of_each_pair(function: MaskFunction) -> MaskFunction:
    """Give a mask a value for each query and key, also where it looks at neither."""

    def of_each_pair(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        return function(row, head, query, key) & (query >= 0) & (key >= 0)

    return of_each_pair


def _whole(held: Tensor, rows: CutRows, expect: Expect) -> Tensor:
    """Return the whole rows of a tensor that a mask closes over, if it has a number for each of a rank's tokens."""
    own = rows.counts[rows.rank]
    if own not in held.shape or own == rows.length:
        return held
    error = UnsupportedError(
        f"the mask of flex_attention closes over a tensor of {list(held.shape)}, one number for each of this rank's"
        f" {own} tokens, and is asked about the {rows.length} tokens of whole rows. Let it close over the batch's"
        f" document_ids themselves, or over nothing, or set layout.cp = 1"
    )
    if (whole := rows.documents) is not None:
        for part, of_rows in ((rows.take(whole), whole), (rows.take(whole)[0], whole[0])):
            if len(whole) in (1, len(of_rows)) and part.shape == held.shape:
                expect((to_device(part, held.device) == held).all(), error)
                return of_rows
    raise error
