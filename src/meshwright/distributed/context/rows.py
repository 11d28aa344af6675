"""Cut a microbatch's rows over the ranks of the context axis, and know where every token lies and which it reaches.

Where tokens lie, and what follows from it, is decided and kept on the host, so that no decision waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.core.devices import is_accelerator, to_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import by_values, has_no_values, version_of
from meshwright.distributed.exchange import RankGroup
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import not_counted
from meshwright.introspection.constructor import seeded
from meshwright.introspection.mixing.arithmetic import raise_unless
from meshwright.introspection.mixing.masks import (
    KeyRanges,
    MaskFunction,
    RowMask,
    TokenMask,
    fingerprint,
    is_reach,
    replaced,
    search,
    segments_of,
)
from meshwright.introspection.mixing.whole import META, whole_arguments
from meshwright.introspection.signature import SPELLINGS, TARGETS, Signature
from meshwright.planning.context.documents import cut_documents
from meshwright.planning.context.plan import ContextPlan, RowCut, cut_row

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
    def most(self) -> int:
        """Tokens of a row on the rank that has most."""
        return self.places.shape[-1]

    @property
    def own(self) -> Tensor:
        """(rows or 1, own tokens) int64: the places of this rank's tokens, ascending."""
        return self.of_ranks[self.rank]

    @cached_property
    @by_values
    def of_ranks(self) -> tuple[Tensor, ...]:
        """(rows or 1, tokens) int64 for each rank: the places of its tokens, ascending."""
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

    def of(self, chosen: list[int]) -> CutRows:
        """Return where the tokens of some of the rows lie."""
        names = ("positions", "segments", "documents", "padding")
        values = {name: value[chosen] for name in names if (value := getattr(self, name)) is not None}
        places = self.places if self.places.shape[1] == 1 else self.places[:, chosen]
        return replace(self, places=places, **values, count=len(chosen), memo={})


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
    cut: RowCut = "head_tail",
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
    cuts = [cut_row(cut, length, ranks)]
    if parted is not None:  # as many tokens for each rank as of any other row
        of_rows = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in parted]
        cuts = [cuts[0] if len(sizes) == 1 else cut_documents(sizes, ranks) for sizes in of_rows]
    counts = tuple(sum(stop - start for start, stop in runs) for runs in cuts[0])
    places = torch.full((ranks, len(cuts), max(counts)), FILLER, dtype=torch.int64)
    for row, runs_of_ranks in enumerate(cuts):
        for number, runs in enumerate(runs_of_ranks):
            places[number, row, : counts[number]] = torch.cat([torch.arange(*run) for run in runs])
    where = (rank, length, places, counts, positions, segments, documents, batch.get(MASK), parted is not None)
    return CutRows(*where, count=len(batch["tokens"]))


class CutBatch(dict[str, Tensor]):
    """A microbatch with one rank's tokens of each row; ``rows``: where the others lie."""

    rows: CutRows

    def of(self, values: Mapping[str, Tensor], chosen: list[int]) -> CutBatch:
        """Return a microbatch of some of the rows, whose values are given."""
        made = CutBatch(values)
        made.rows = self.rows.of(chosen)
        return made


def cut_batch(batch: Mapping[str, Tensor], rows: CutRows, *, whole_mask: bool = False) -> CutBatch:
    """Return a microbatch with this rank's tokens alone; ``whole_mask``: transformers takes the padding whole."""
    size = batch["tokens"].shape
    made = CutBatch()
    for key, value in batch.items():
        is_cut = value.shape[:2] == size and not (key == MASK and whole_mask)
        made[key] = select(value, rows.own, 1) if is_cut else value
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
            of_pairs = key == MASK and value.dim() > 2
            pairs = " Of masks for pairs of tokens, rows are cut with the model's own alone." if of_pairs else ""
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


# --- find the reach of masks, once for each mask and length

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

    def of(self, mask: RowMask, rows: CutRows, count: int, device: torch.device = CPU) -> KeyRanges | None:
        """Return the reach of all tokens of ``count`` rows, by places; None where a query's keys are no interval."""
        if mask in rows.memo:
            return rows.memo[mask]

        def find(function: MaskFunction, length: int) -> KeyRanges | None:
            code, where = fingerprint(function), device
            key = (code, length, count)
            if code is not None and key in self._known:
                return self._known[key]
            if is_accelerator(where):  # ask the mask on the host, unless it reaches tensors on the device otherwise
                brought = replaced(function, lambda held: held.cpu() if is_accelerator(held.device) else held)
                first = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
                with suppress(RuntimeError):  # tensors of two devices
                    if brought(first, first[0, 0, 0, 0], first, first).device == CPU:
                        function, where = brought, CPU
            found = search(function, length, count, where)
            if not mask.is_known:
                mine = torch.arange(self._group.rank, length, self._group.size, device=where)[None]
                is_right = found is not None and is_reach(function, found, mine, length, count)
                wrong = torch.tensor([not is_right], dtype=torch.int64, device=agree.word_device())
                with not_counted():
                    found = None if bool(self._group.largest(wrong)) else found
            if found is not None:
                found = KeyRanges(found.lower.cpu(), found.upper.cpu())
            if code is not None:
                self._known[key] = found
            return found

        rows.memo[mask] = by_values(mask.reach)(rows.length, find)
        return rows.memo[mask]


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

    Of tensors that it closes over, the batch's documents alone are known, and are taken from whole rows.
    """
    key = (function, "whole rows")
    if key not in rows.memo:
        by_places = replaced(function, lambda held: _whole(held, rows, expect))

        def of_each_pair(row: Any, head: Any, query: Any, key: Any) -> Tensor:
            # a value for each query and key, also where it looks at neither
            return by_places(row, head, query, key) & (query >= 0) & (key >= 0)

        rows.memo[key] = RowMask(of_each_pair)
    return rows.memo[key]


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


# --- hand modules that compute whole rows the masks and biases of whole rows

MOST_IN_DRY_RUNS = 2**27
"""Pairs of tokens up to which a dry run makes them with values, where code looks at these."""
PLAIN = (bool, int, float, str)
"""Types of attributes that a forward may read and a user may change between steps."""


@dataclass(eq=False)
class Made:
    """The arguments of some rows, by module and path."""

    known: dict[str, dict[str, Any]]
    of: tuple[Any, ...]
    """What they follow from, to see whether the next rows are alike."""
    held: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    """Tensors in the dtypes in which they were asked for, by the numbers (``id``) of those in ``known``."""


@dataclass
class PairArguments:
    """What modules are given for pairs of tokens, of the whole rows that are computed now.

    ``copy``: of the model, on meta, before anything was changed. Rows keep what is theirs, for a backward that
    recomputes.
    """

    copy: nn.Module
    plan: ContextPlan
    last: Made | None = None

    def refuse_other_keys(self, batch: Mapping[str, Tensor], signature: Signature) -> None:
        """Refuse tensors of a batch that may have a say in the arguments, which are computed without them."""
        known = {*DECIDING, *TARGETS}
        other = next((key for key in batch if key not in known and signature.argument_of(key) is not None), None)
        if other is not None:
            path = next(planned.mixer.path for planned in self.plan.mixers if planned.mixer.pairs)
            raise UnsupportedError(
                f"{path} computes whole rows, and what it is given for pairs of tokens is made of positions, documents"
                f" and padding alone, while the batch has '{other}' too. Leave it out, or set layout.cp = 1."
            )

    @by_values
    def enter(self, model: nn.Module, rows: CutRows, device: torch.device) -> None:
        """Compute the arguments of these rows, unless the last ones were alike."""

        def are_alike(one: Any, other: Any) -> bool:
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                return torch.equal(one, other)
            return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)

        brought = {"positions": rows.positions, "document_ids": rows.documents, MASK: rows.padding}
        names = {clean(name): buffer for name, buffer in model.named_buffers()}
        buffers = {name: names[clean(name)] for name, _ in self.copy.named_buffers() if clean(name) in names}
        written = tuple((id(buffer), version_of(buffer)) for buffer in buffers.values())
        shape, attributes = (rows.count, rows.length), plain_attributes(model)
        of = (model.training, shape, device, written, attributes, *brought.values())
        if self.last is None or not all(map(are_alike, of, self.last.of)):
            # the copy gets the mode and the attributes that the model has now
            self.copy.train(model.training)
            modules = {clean(path): module for path, module in self.copy.named_modules()}
            for (path, name), value in attributes.items():
                has: Any = modules.get(path)
                if name.startswith("config."):
                    has, name = getattr(has, "config", None), name.removeprefix("config.")
                if has is not None and vars(has).get(name, value) != value:
                    setattr(has, name, value)
            batch = {key: value for key, value in brought.items() if value is not None}
            batch["tokens"] = torch.zeros(shape, dtype=torch.int64)
            wanted = {mixer.path: mixer.pairs for mixer in (each.mixer for each in self.plan.mixers) if mixer.pairs}
            compute = partial(whole_arguments, self.copy, buffers, batch, wanted)
            with seeded(0):  # draws of the copy are none of the run's
                try:
                    known = compute(device)
                except Exception:
                    if device != META or math.prod(shape) * rows.length > MOST_IN_DRY_RUNS:
                        raise
                    known = compute(CPU)  # the model's code looks at values of positions or masks
            self.last = Made(known, of)
        rows.memo[PairArguments] = self.last

    def given(self, path: str, key: str, instead: Tensor | TokenMask, rows: CutRows) -> Any:
        """Return an argument of whole rows that depends on no weight, instead of what the module is given."""
        made: Made | None = rows.memo.get(PairArguments)
        known = {} if made is None else made.known.get(path, {})
        whole = known.get(key)
        if made is not None and isinstance(instead, Tensor) and isinstance(whole, Tensor):
            place = id(whole), instead.dtype  # blocks are given one tensor
            if place not in made.held and has_no_values(instead):
                made.held[place] = instead.new_empty(whole.shape)
            elif place not in made.held and not whole.is_meta:
                cast, dtype = whole, instead.dtype
                if whole.dtype != dtype and whole.is_floating_point() and dtype.is_floating_point:
                    # the smallest number of a dtype, by which masks block, is that of the other
                    most = min(torch.finfo(dtype).max, torch.finfo(whole.dtype).max)
                    cast = torch.where(whole.isinf(), whole, whole.clamp(-most, most))
                made.held[place] = cast.to(dtype)
            if (found := made.held.get(place)) is not None:
                return found
        elif key in known and (whole is None or not whole.is_meta):
            return whole
        raise UnsupportedError(
            f"{path} computes whole rows, and what it is given for pairs of tokens ({key}) depends on weights, or on"
            f" buffers that are not at hand. Set layout.cp = 1, or layout.pp = 1."
        )


def plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the plain attributes of a model's modules and configs, without those that layouts set."""
    found: dict[tuple[str, str], Any] = {}
    configs: set[int] = set()
    for path, module in model.named_modules():
        config = vars(module).get("config")
        holders = [("", module)]
        if config is not None and id(config) not in configs and hasattr(config, "__dict__"):
            configs.add(id(config))
            holders.append(("config.", config))
        for prefix, holder in holders:
            for name, value in vars(holder).items():
                if type(value) in PLAIN and not name.startswith("_") and (prefix or name != "training"):
                    found[clean(path), prefix + name] = value
    return found
