"""Take batches of which each rank of the context axis brings its own tokens, with their places in whole rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.process import agree
from meshwright.introspection.mixing.masks import segments_of
from meshwright.introspection.signature import Signature

from .rows import FILLER, MASK, PLACES, CutBatch, CutRows, on_host, place
from .runtime import ContextRuntime

ROWS_OF = ("positions", "document_ids", MASK)
"""Keys whose whole rows every rank needs, for masks."""

Batch = Mapping[str, Tensor]


def other_rows(ranks: int) -> ConfigError:
    """Return the error of ranks that should have brought the same rows."""
    return ConfigError(
        f"the {ranks} ranks of the cp axis brought different rows: they share the tokens of the same rows. Give a"
        f" loader the rank and size of the data axes (dp_replicate × dp_shard) alone, or give each rank its own tokens"
        f" with their places (batch['{PLACES}'])"
    )


def are_parts(pieces: Sequence[Batch], *, cuts_rows: bool) -> bool:
    """Return whether a rank's microbatches hold its own tokens alone.

    Raises:
        ConfigError: only some of them say so, rows are not cut, or places are of another shape or not ascending.
    """
    bring = [PLACES in piece for piece in pieces]
    if not any(bring):
        return False
    if not cuts_rows:
        raise ConfigError(
            f"batch['{PLACES}'] says that a rank has a part of each row, and layout.cp = 1: give whole rows without it"
        )
    if not all(bring):
        raise ConfigError(
            f"{sum(bring)} of {len(bring)} microbatches bring '{PLACES}': give it with all of them, or whole rows alone"
        )
    for piece in pieces:
        _check(piece[PLACES], piece.get("tokens"))
    return True


def _check(places: object, tokens: Tensor | None) -> None:
    if not isinstance(places, Tensor) or places.dtype != torch.int64:
        kind = places.dtype if isinstance(places, Tensor) else type(places).__name__
        raise ConfigError(f"batch['{PLACES}'] holds {kind}; it must hold torch.int64, a tensor like tokens")
    if isinstance(tokens, Tensor) and places.shape != tokens.shape:
        shapes = f"{tuple(places.shape)}, but tokens have {tuple(tokens.shape)}"
        raise ConfigError(f"batch['{PLACES}'] has shape {shapes}: it says each token's place in its row")
    if bool((places.diff(dim=-1) <= 0).any()) or bool((places < 0).any()):
        raise ConfigError(
            f"batch['{PLACES}'] must ascend from 0 in each row: bring tokens in the order that they have in whole rows"
        )


def without_places(piece: Batch) -> Batch:
    """Return a microbatch with its other keys alone."""
    return {key: value for key, value in piece.items() if key != PLACES}


def refuse_some(parts: int, ranks: int) -> None:
    """Raise ConfigError if some of the ranks bring their own tokens and others whole rows."""
    if 0 < parts < ranks:
        raise ConfigError(
            f"{parts} of {ranks} ranks bring batch['{PLACES}'], each token's place in its row, and the others do not:"
            f" all ranks bring their own tokens with places, or all bring whole rows"
        )


def join(piece: Batch, runtime: ContextRuntime, signature: Signature, longest: int | None = None) -> CutBatch:
    """Find where the other ranks' tokens lie, and return the microbatch as if its rows had been cut here.

    Collective over the context axis: two messages.

    Args:
        longest: most tokens of a row that the model takes.

    Raises:
        ConfigError: on all ranks of the axis: they have other rows or keys, or places overlap or leave gaps.
        UnsupportedError: see ``ContextRuntime.cut``.
    """
    counts, gathered = _exchange(on_host(piece), runtime.group)
    places, length = gathered.pop(PLACES), sum(counts)
    _refuse_gaps(places, length)
    if longest and length > longest:
        raise ConfigError(
            f"the batch has sequences of {length} tokens on all ranks of the cp axis together, more than the model's"
            f" maximum of {longest}: shorten them"
        )
    whole = {key: _whole(parts, places, length) for key, parts in gathered.items()}
    runtime.check(piece, signature, length)
    positions, documents = whole.get("positions"), whole.get("document_ids")
    segments = segments_of(positions) if runtime.mixing.implementation and positions is not None else None
    alike = places[:, :1] if bool((places == places[:, :1]).all()) else places
    has_documents = (segments if runtime.mixing.implementation else documents) is not None
    where = (runtime.group.rank, length, alike, counts, positions, segments, documents, whole.get(MASK))
    made = CutBatch(without_places(piece))
    made.rows = CutRows(*where, has_documents and runtime.plan.cuts_documents, count=len(piece["tokens"]))
    runtime.check_rows(made.rows)
    if signature.takes["positions"] is not None and "positions" not in made and runtime.mixing.counts_from_zero:
        made["positions"] = piece[PLACES]
    if not runtime.mixing.implementation:
        return made
    if MASK in piece:
        made[MASK] = to_device(whole[MASK].to(piece[MASK].dtype), piece[MASK].device)
    elif MASK in signature.arguments:
        made[MASK] = torch.ones((len(piece["tokens"]), length), dtype=torch.int64, device=piece["tokens"].device)
    return made


def join_all(pieces: Sequence[Batch], groups: list[dist.ProcessGroup], *options: Any) -> list[Batch]:
    """Join the microbatches of a step, and raise one rank's error on all ranks of some groups; see ``join``."""
    problem: Exception | None = None
    joined: list[Batch] = []
    try:
        joined = [join(piece, *options) for piece in pieces]
    except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
        problem = error
    if agree.total(torch.tensor([problem is not None], dtype=torch.int64), groups).item():
        agree.raise_first(problem, groups)
    return joined


def _exchange(piece: Batch, group: RankGroup) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return tokens of a row on each rank, and (ranks, rows, most) of places and what else masks need, filled up.

    Both messages, and what they bring, stay on the host where it has a backend.
    """
    device = agree.word_device()
    rows, own = piece["tokens"].shape
    here = [key in piece for key in ROWS_OF]
    head = torch.tensor([own, rows, *here], dtype=torch.int64, device=device)
    heads = group.gather_features(head).tolist()
    if any(other[1:] != heads[0][1:] for other in heads):
        words = "; ".join(
            f"rank {rank}: {other[1]} rows of {other[0]} tokens with"
            f" {', '.join([PLACES, *(key for key, is_there in zip(ROWS_OF, other[2:], strict=True) if is_there)])}"
            for rank, other in enumerate(heads)
        )
        raise ConfigError(f"the ranks of the cp axis bring parts of other rows, or other keys ({words})")
    counts = tuple(other[0] for other in heads)
    keys = [PLACES, *(key for key, is_there in zip(ROWS_OF, here, strict=True) if is_there)]
    filled = torch.full((len(keys), rows, max(counts)), FILLER, dtype=torch.int64)
    for number, key in enumerate(keys):
        filled[number, :, :own] = piece[key]
    parts = group.gather_features(filled.to(device)).cpu()
    return counts, {key: parts[:, number] for number, key in enumerate(keys)}


def _refuse_gaps(places: Tensor, length: int) -> None:
    """Raise ConfigError unless each place from 0 to ``length`` - 1 is on one rank; ``places``: (ranks, rows, most)."""
    ranks, rows, most = places.shape
    flat = places.transpose(0, 1).reshape(rows, ranks * most)
    counts = torch.zeros((rows, length + 1), dtype=torch.int64, device=flat.device)
    counts.scatter_add_(1, torch.where((flat == FILLER) | (flat >= length), length, flat), torch.ones_like(flat))
    if bool((counts[:, :length] == 1).all()):
        return
    row = int((counts[:, :length] != 1).any(1).nonzero()[0])
    twice, gap = ((counts[row, :length] > 1).nonzero(), (counts[row, :length] == 0).nonzero())
    sizes = f"row {row} has {length} tokens on all ranks of the cp axis together"
    if len(twice):
        one = int(twice[0])
        on = [rank for rank in range(ranks) if bool((places[rank, row] == one).any())]
        raise ConfigError(f"batch['{PLACES}'] overlaps: {sizes}, and place {one} is on the ranks {on}")
    raise ConfigError(
        f"batch['{PLACES}'] leaves a gap: {sizes}, and none has place {int(gap[0])}, while places go up to"
        f" {int(flat[row].max())}"
    )


def _whole(parts: Tensor, places: Tensor, length: int) -> Tensor:
    """Put (ranks, rows, most) parts together by their places: (rows, length)."""
    ranks, rows, most = parts.shape
    index = torch.where(places == FILLER, length, places).transpose(0, 1).reshape(rows, ranks * most)
    made = parts.new_zeros((rows, length + 1))
    place(made, index, 1, parts.transpose(0, 1).reshape(rows, ranks * most))
    return made[:, :length].contiguous()
