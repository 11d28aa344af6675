"""Give a model that counts a row's tokens to make positions those of this rank's tokens.

The lines that count were measured (``introspection.mixing.lengths``). Where one of them makes a range of as many
integers as this rank has tokens, the places of these tokens stand in; where one takes so many entries of a table, the
entries at these places; where one sums integers along the tokens, those of all ranks are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.record import wrap
from meshwright.core.torch_private import has_no_values, uncompiled
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.logits_tape import model_line, shown
from meshwright.introspection.mixing.values import (
    LengthUse,
    Mixing,
    ends_of_range,
    in_words,
    runs_of,
    scanned,
    value_of,
)

from .attention import RowsInUse, gather_tokens
from .rows import PLACES, CutRows, kept_on, select


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
        """Return (own tokens,) int64, the same for all rows (``refuse_other_rows``)."""
        return kept_on(self.rows.own, device)[0]

    def _entries(self, x: Tensor, dim: int, run: slice) -> Tensor:
        """Return the entries of a table at this rank's places; ``x`` itself where it has this rank's tokens alone."""
        size, start = x.size(dim), run.start or 0
        if size == self.own and not isinstance(x, nn.Parameter):
            return x
        if size < start + self.rows.length:
            raise UnsupportedError(
                f"a table of {size} positions is read for rows of {self.rows.length} tokens at {shown(*model_line())}:"
                f" bring rows of at most {size - start} tokens, or make the table longer"
            )
        return torch.index_select(x, dim, self._places(x.device) + start)


def refuse_other_rows(mixing: Mixing, rows: CutRows) -> None:
    """Refuse rows of which parts are another case to the model, or whose tokens it would count otherwise.

    All ranks come to the same verdict.

    Raises:
        UnsupportedError: a line decides by the length of a row, and would decide otherwise by that of a part.
        ConfigError: the model counts the tokens of all rows alike, and ranks bring tokens of other places in each row.
    """
    for use in mixing.lengths:
        if use.kind in ("positions", "table") and rows.places.shape[1] > 1:
            raise ConfigError(
                f"batch['{PLACES}'] differs from row to row, and the model counts the tokens of all rows alike at"
                f" {shown(use.file, use.line)}: cut all rows of a batch at the same places"
            )
        if use.kind == "condition":
            whole = _case(use, rows.length)
            part = next((count for count in rows.counts if _case(use, count) != whole), None)
            if part is not None:
                raise UnsupportedError(
                    f"the model decides by the length of a row at {shown(use.file, use.line)} (is"
                    f" {in_words(use.expression)}?), and would do so by the {part} tokens of a rank instead of"
                    f" {rows.length}. Decide by an attribute of the model instead, or set layout.cp = 1."
                )


def _case(condition: LengthUse, length: int) -> bool | None:
    try:
        return value_of(condition.expression, length)
    except ArithmeticError:
        return None
