"""Find the reach of masks, once for each mask and length."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.torch_private import by_values
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.recompute.kept import not_counted
from meshwright.introspection.mixing.masks import MaskFunction
from meshwright.introspection.mixing.reach import KeyRanges, RowMask, fingerprint, is_reach, search

from .rows import CutRows


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
    def of(self, mask: RowMask, rows: CutRows, count: int) -> KeyRanges | None:
        """Return the reach of all tokens of ``count`` rows, by places; None where a query's keys are no interval."""
        if mask not in rows.memo:
            device = rows.places.device

            def known(function: MaskFunction, length: int) -> KeyRanges | None:
                return self._of(function, length, count, device, is_known=mask.is_known)

            rows.memo[mask] = mask.reach(rows.length, known)
        return rows.memo[mask]

    def _of(
        self, function: MaskFunction, length: int, count: int, device: torch.device, *, is_known: bool
    ) -> KeyRanges | None:
        code = fingerprint(function)
        key = (code, length, count, device)
        if code is not None and key in self._known:
            return self._known[key]
        found = search(function, length, count, device)
        if not is_known:
            mine = torch.arange(self._group.rank, length, self._group.size, device=device)[None]
            is_right = found is not None and is_reach(function, found, mine, length, count)
            wrong = torch.tensor([not is_right], dtype=torch.int64, device=device)
            with not_counted():
                found = None if bool(self._group.largest(wrong)) else found
        if code is not None:
            self._known[key] = found
        return found
