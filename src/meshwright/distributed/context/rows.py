"""Cut a microbatch's rows over the ranks of the context axis, and know where every token lies.

Where tokens lie, and what follows from it, is decided and kept on the host, so that no decision waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.core.devices import is_accelerator, to_device
from meshwright.core.errors import ConfigError
from meshwright.core.torch_private import by_values
from meshwright.introspection.mixing.masks import segments_of
from meshwright.introspection.signature import SPELLINGS
from meshwright.planning.context.cut import Cut, Runs, cut_row
from meshwright.planning.context.documents import cut_documents

FILLER = -1
Apart = Literal["", "positions", "ids"]
PLACES = "places"
"""Key of a batch: (rows, own tokens) int64, the place of each token in its whole row, ascending."""
MASK = "attention_mask"
"""Key of a batch: (rows, length), 0 for padding, as models of transformers take it."""
LIKE_TOKENS = ("labels", "loss_mask", MASK, *(key for key in SPELLINGS if key != "tokens"))
"""Keys whose tensors have a value for each token."""
DECIDING = ("tokens", "positions", "document_ids", MASK, PLACES)
"""Keys by whose values is decided where tokens lie, and which attend to which."""

_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def kept_on(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device: copied once, without waiting, and kept as long as the host's tensor."""
    if values.device == device or not is_accelerator(device):
        return values
    found = _copies.get(values)
    if found is None or found.device != device:
        _copies[values] = found = _copied(values, device)
    return found


_copied = by_values(to_device)


@by_values
def on_host(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a batch that decide where tokens lie; those on a device are read at once, in one copy."""
    found = {key: batch[key] for key in DECIDING if key in batch}
    away = {key: value for key, value in found.items() if is_accelerator(value.device)}
    if away:
        flat = [value.contiguous().flatten().view(torch.uint8) for value in away.values()]
        read = torch.cat(flat).cpu().split([len(part) for part in flat])
        found |= {
            key: part.clone().view(value.dtype).view(value.shape)
            for part, (key, value) in zip(read, away.items(), strict=True)
        }
    return found


@dataclass(frozen=True, eq=False)
class CutRows:
    """Where the tokens of a microbatch's rows lie; all tensors are on the host.

    Attributes:
        rank: this process's rank on the context axis.
        length: tokens of a whole row.
        places: (ranks, rows or 1, most) int64: the place in its row of each token that a rank has, in the order in
            which it has them; FILLER behind the last one of a rank that has fewer than ``most``. 1: alike in all rows.
        counts: tokens of a row on each rank.
        positions: (rows, length) int64, the whole rows' positions; None where the batch has none.
        segments: (rows, length) int64, the runs of consecutive positions; None where each row is one.
        documents: (rows, length) int64, the whole rows' documents; None where the batch has none.
        padding: (rows, length), the batch's own padding mask, 0 for padding; None where it brings none.
        has_documents: rows were cut by their documents.
        count: number of rows.
    """

    rank: int
    length: int
    places: Tensor
    counts: tuple[int, ...]
    positions: Tensor | None = None
    segments: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    has_documents: bool = False
    count: int = 1
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """For each mask of the microbatch, what follows from it and from where the tokens lie."""

    @property
    def has_mask(self) -> bool:
        """Whether the batch brings a padding mask of its own."""
        return self.padding is not None

    @property
    def most(self) -> int:
        """Tokens of a row on the rank that has most."""
        return self.places.shape[-1]

    @property
    def own(self) -> Tensor:
        """(rows or 1, own tokens) int64: the places of this rank's tokens, ascending."""
        return self.places_of(self.rank)

    def places_of(self, rank: int) -> Tensor:
        """(rows or 1, tokens) int64: the places of one rank's tokens, ascending."""
        return self.of_ranks[rank]

    @cached_property
    @by_values
    def of_ranks(self) -> tuple[Tensor, ...]:
        """The places of each rank's tokens."""
        return tuple(self.places[rank, :, :count] for rank, count in enumerate(self.counts))

    @cached_property
    @by_values
    def slots(self) -> Tensor:
        """(rows or 1, length) int64: rank · most + number on that rank, for each token of a whole row."""
        ranks, rows, most = self.places.shape
        real = self.places.transpose(0, 1).reshape(rows, ranks * most)
        order = torch.where(real == FILLER, self.length, real).argsort(dim=1, stable=True)
        return order[:, : self.length]

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of (rows, length, …)."""
        return select(whole, self.own, 1)


def select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the elements of ``x`` along ``dim`` at an index per row, (rows or 1, n); dim 0 of ``x`` is rows."""
    index = kept_on(index, x.device)
    if index.shape[0] == 1:
        return torch.index_select(x, dim, index[0])
    return torch.gather(x, dim, _for_rows(index, x, dim))


def place(x: Tensor, index: Tensor, dim: int, part: Tensor) -> None:
    """Write elements along ``dim`` of ``x`` at an index per row: ``select`` the other way round."""
    index = kept_on(index, x.device)
    if index.shape[0] == 1:
        x.index_copy_(dim, index[0], part)
    else:
        x.scatter_(dim, _for_rows(index, part, dim), part)


MOST_RUNS = 8
"""Runs of consecutive numbers up to which tokens are copied run by run: an index costs a look-up for each token."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Which of the tokens of (rows, heads, tokens, features) some are.

    Attributes:
        index: (rows or 1, n) int64, on the host.
        runs: the same as runs of consecutive numbers, where all rows are alike and runs are few.
    """

    index: Tensor
    runs: tuple[slice, ...] | None

    @classmethod
    @by_values
    def of(cls, index: Tensor) -> Numbers:
        if index.shape[0] != 1 or index.shape[1] == 0:
            return cls(index, None)
        breaks = (index[0].diff() != 1).nonzero()[:, 0] + 1
        if len(breaks) >= MOST_RUNS:
            return cls(index, None)
        ends = [0, *breaks.tolist(), index.shape[1]]
        starts = index[0][ends[:-1]].tolist()
        sizes = [stop - start for start, stop in pairwise(ends)]
        return cls(index, tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True)))

    def take(self, x: Tensor, out: Tensor) -> None:
        """Copy these tokens of ``x``, one behind the other, into ``out``."""
        if self.runs is None:
            out.copy_(select(x, self.index, 2))
        elif len(self.runs) == 1:
            out.copy_(x[:, :, self.runs[0]])
        else:
            for run, part in self._parts(out):
                part.copy_(x[:, :, run])

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write tokens to where these are in ``x``."""
        if self.runs is None:
            place(x, self.index, 2, part)
        elif len(self.runs) == 1:
            x[:, :, self.runs[0]].copy_(part)
        else:
            for run, some in self._parts(part):
                x[:, :, run].copy_(some)

    def _parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        assert self.runs is not None
        return zip(self.runs, x.split([run.stop - run.start for run in self.runs], dim=2), strict=True)


def _for_rows(index: Tensor, x: Tensor, dim: int) -> Tensor:
    """Shape an index per row, (rows, n), as (rows, …, n, …), for as many elements of the other dims as ``x`` has."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return index.view(shape).expand(*x.shape[:dim], index.shape[1], *x.shape[dim + 1 :])


@by_values
def cut_rows(
    batch: Mapping[str, Tensor],
    ranks: int,
    rank: int,
    *,
    cut: Cut = "head_tail",
    by_positions: bool = False,
    apart: Apart = "",
) -> CutRows:
    """Decide where the tokens of a microbatch lie.

    Args:
        batch: whole rows: tokens (rows, length), optional positions, document_ids and attention_mask.
        cut: which tokens each rank has of a row that is one document.
        apart: how tokens of other documents are known, which no token sees: by "positions" that do not follow each
            other, or by "ids"; "": there are none, and all rows are cut alike.
        by_positions: positions that do not follow each other keep documents apart, as in transformers.

    Raises:
        ConfigError: rows have fewer tokens than there are ranks.
    """
    length = batch["tokens"].shape[1]
    batch = on_host(batch)
    positions, documents = batch.get("positions"), batch.get("document_ids")
    segments = segments_of(positions) if by_positions and positions is not None else None
    parted = {"": None, "positions": segments, "ids": documents}[apart]
    cuts = [cut_row(cut, length, ranks)] if parted is None else [_by_documents(row, ranks, cut) for row in parted]
    counts = tuple(sum(stop - start for start, stop in runs) for runs in cuts[0])
    places = torch.full((ranks, len(cuts), max(counts)), FILLER, dtype=torch.int64)
    for row, runs_of_ranks in enumerate(cuts):
        for number, runs in enumerate(runs_of_ranks):
            places[number, row, : counts[number]] = torch.cat([torch.arange(*run) for run in runs])
    has_documents = parted is not None
    where = (rank, length, places, counts, positions, segments, documents, batch.get(MASK), has_documents)
    return CutRows(*where, count=len(batch["tokens"]))


def _by_documents(row: Tensor, ranks: int, cut: Cut) -> tuple[Runs, ...]:
    """Cut one row by its documents, (length,) numbers; as many tokens for each rank as of any other row."""
    sizes = torch.unique_consecutive(row, return_counts=True)[1].tolist()
    return cut_row(cut, len(row), ranks) if len(sizes) == 1 else cut_documents(sizes, ranks)


class CutBatch(dict[str, Tensor]):
    """A microbatch with one rank's tokens of each row; ``rows``: where the others lie."""

    rows: CutRows


def cut_batch(batch: Mapping[str, Tensor], rows: CutRows, *, whole_mask: bool = False) -> CutBatch:
    """Return a microbatch with this rank's tokens alone.

    Args:
        whole_mask: a padding mask stays whole, as transformers' mask interface takes it.
    """
    size = batch["tokens"].shape
    made = CutBatch()
    for key, value in batch.items():
        made[key] = (
            select(value, rows.own, 1) if value.shape[:2] == size and not (key == MASK and whole_mask) else value
        )
    made.rows = rows
    return made


def refuse_other_shapes(batch: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a tensor whose tokens do not lie along the second of two dims, (rows, tokens).

    A mask for each pair of tokens, (…, tokens, tokens), would stay whole, or be cut along one of its dims.
    """
    size = tuple(batch["tokens"].shape)
    for key, value in batch.items():
        shape = tuple(value.shape)
        if key in LIKE_TOKENS and shape != size:
            pairs = (
                " Of masks for pairs of tokens, rows are cut with the model's own alone."
                if key == MASK and value.dim() > 2
                else ""
            )
            raise ConfigError(
                f"batch['{key}'] has shape {shape}, but tokens have {size}, and rows are cut over ranks.{pairs}"
            )
        of_pairs = "mask" in key or "bias" in key
        if (shape[:2] != size and size[1] in shape) or (of_pairs and size[1] in shape[2:]):
            raise ConfigError(
                f"batch['{key}'] has shape {shape}, in which the {size[1]} tokens of a row lie elsewhere than along the"
                f" second of two dims, (rows, tokens, …), along which rows are cut over ranks: leave it to the model,"
                f" or give it with these dims"
            )
