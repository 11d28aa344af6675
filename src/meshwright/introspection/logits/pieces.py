"""Cut what operators on logits take beside them, as the logits themselves are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Beside:
    """A tensor that an operator takes beside the logits, to be cut as they are.

    Attributes:
        rows: (tokens or 1, columns or 1).
        columns: the vocabulary's ids that its columns are for; None: it is not cut.
    """

    rows: Tensor
    columns: range | None


@dataclass(frozen=True)
class Ids:
    """Ids along the last dim (1-D integers, or one bool for each column) that an operator writes to."""

    ids: Tensor
    columns: range


@dataclass(frozen=True)
class Value:
    """The place of a deferred tensor among a tape's values."""

    place: int


def within(columns: range, here: range) -> range:
    """Return the ids of ``columns`` that are in ``here``, a run of ids."""
    begin = max(0, -(-(here.start - columns.start) // columns.step))
    end = max(begin, min(len(columns), -(-(here.stop - columns.start) // columns.step)))
    return columns[begin:end]


def columns_of(piece: Tensor, held: range, kept: range, here: range) -> Tensor:
    """Return a view of the columns ``kept`` of a piece that has those of ``held`` that are in ``here``."""
    have, want = within(held, here), within(kept, here)
    begin = (want.start - have.start) // have.step if want else 0
    return piece[:, begin : begin + len(want) * (want.step // have.step) : want.step // have.step]


def ids_here(ids: Tensor, columns: range, here: range) -> Tensor:
    """Return which of a piece's columns are meant: (1, columns here), bool."""
    mine = within(columns, here)
    begin = (mine.start - columns.start) // columns.step
    if ids.dtype != torch.bool:
        chosen = torch.zeros(len(columns), dtype=torch.bool, device=ids.device)
        ids = chosen.index_fill_(0, ids.long() % len(columns), True)
    return ids[begin : begin + len(mine)].unsqueeze(0)
