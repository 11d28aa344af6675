"""Give a model that counts a row's tokens to make positions those of this rank's tokens.

The lines that count were measured (``introspection.mixing.lengths``). Where one of them makes a range of as many
integers as this rank has tokens, the places of these tokens stand in; where one takes so many entries of a table, the
entries at these places; where one sums integers along the tokens, those of all ranks are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import UnsupportedError
from meshwright.core.record import wrap
from meshwright.core.torch_private import has_no_values, uncompiled
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.logits.model_line import model_line, shown
from meshwright.introspection.mixing.lengths import ends_of_range, runs_of, scanned
from meshwright.introspection.mixing.values import LengthUse

from .attention import gather_tokens
from .mixers import RowsInUse
from .rows import CutRows, kept_on, select


def wrap_counting(module: nn.Module, uses: Iterable[LengthUse], runtime: RowsInUse) -> None:
    """Let a module's forward count this rank's tokens by their places in whole rows."""
    lines = {(use.file, use.line): use.kind for use in uses}

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        @uncompiled  # rows change with each microbatch
        def counting_forward(*args: Any, **kwargs: Any) -> Any:
            if runtime.rows is None:
                return forward(*args, **kwargs)
            with _OwnPlaces(lines, runtime.rows, runtime.group):
                return forward(*args, **kwargs)

        return counting_forward

    wrap(module, make, f"positions of cp {runtime.group.size}")


class _OwnPlaces(TorchFunctionMode):
    def __init__(self, lines: dict[tuple[str, int], str], rows: CutRows, group: RankGroup):
        super().__init__()
        self.lines, self.rows, self.group, self.own = lines, rows, group, rows.counts[rows.rank]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            start, end = ends_of_range(args, kwargs)
            if end - start == self.own and self.lines.get(model_line(__file__)) == "positions":
                counted = func(*args, **kwargs)
                return counted if has_no_values(counted) else self._places(counted.device).to(counted.dtype) + start
        elif (x := scanned(func, args, kwargs)) is not None and not has_no_values(x):
            if x.size(1) == self.own and self.lines.get(model_line(__file__)) == "scan":
                whole = gather_tokens(x[:, None, :, None], self.rows, self.group)[:, 0, :, 0]
                return select(torch.cumsum(whole, 1, dtype=kwargs.get("dtype")), self.rows.own, 1)
        elif func is Tensor.__getitem__ and not has_no_values(args[0]):
            x, index = args
            runs = {dim: run for dim, run in runs_of(x, index).items() if run.stop - (run.start or 0) == self.own}
            if runs and self.lines.get(model_line(__file__)) == "table":
                for dim, run in runs.items():
                    x = self._entries(x, dim, run)
                whole = slice(None)
                items = index if isinstance(index, tuple) else (index,)
                return func(x, tuple(whole if any(item is run for run in runs.values()) else item for item in items))
        return func(*args, **kwargs)

    def _places(self, device: torch.device) -> Tensor:
        """Return (own tokens,) int64."""
        places = self.rows.own
        if len(places) > 1:
            if not torch.equal(places, places[:1].expand_as(places)):
                raise UnsupportedError(
                    f"the model counts a row's tokens at {shown(*model_line())}, the same for all rows, and this rank"
                    f" has tokens of other places in each row. Give batches positions, or rows that are cut alike."
                )
            places = places[:1]
        return kept_on(places, device)[0]

    def _entries(self, x: Tensor, dim: int, run: slice) -> Tensor:
        """Return the entries of a table at this rank's places; ``x`` itself where it has this rank's tokens alone."""
        size, start = x.size(dim), run.start or 0
        if size == self.own and not isinstance(x, nn.Parameter):
            return x
        if size < start + self.rows.length:
            raise UnsupportedError(
                f"a table of {size} positions is read for rows of {self.rows.length} tokens at {shown(*model_line())}"
            )
        return torch.index_select(x, dim, self._places(x.device) + start)


def refuse_other_conditions(uses: Sequence[LengthUse], rows: CutRows) -> None:
    """Raise UnsupportedError where a line decides by the length of a row, and a part of the row would be another case.

    All ranks come to the same verdict.
    """
    for use in uses:
        if use.kind == "condition":
            whole = use.holds(rows.length)
            part = next((count for count in rows.counts if use.holds(count) != whole), None)
            if part is not None:
                raise UnsupportedError(
                    f"the model decides by the number of a row's tokens at {shown(use.file, use.line)} (it compares"
                    f" with {use.other:g}), and would do so by {part} tokens of a rank for {rows.length} of a row."
                    f" Decide by an attribute of the model instead, or set layout.cp = 1."
                )
