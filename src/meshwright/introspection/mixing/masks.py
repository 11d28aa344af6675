"""Describe which tokens of a row attend to which, by their places in the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.errors import UnsupportedError

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]
"""(row, head, query's place, key's place) -> whether the query attends to the key; broadcasts over index tensors."""


@dataclass(eq=False)
class TokenMask:
    """A mask by places in whole rows, where a model expects a mask tensor.

    A model hands it from where masks are made to where attention is computed. Code that computes with it as with a
    tensor is refused: the tensor would be about a part of the tokens.

    Attributes:
        function: the model's own rule.
        rows: what a handler knows of the mask besides.
        compute: called with the arguments of ``F.scaled_dot_product_attention`` where code calls that with this mask.
    """

    function: MaskFunction
    rows: Any
    compute: Callable[..., Tensor]

    @classmethod
    def __torch_function__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operation is F.scaled_dot_product_attention:
            given = sdpa_arguments(args, kwargs or {})
            return given["attn_mask"].compute(**given)
        raise UnsupportedError(f"its code computes with the attention mask itself ({operation.__name__})")

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedError(f"its code computes with the attention mask itself ([{index}])")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"its code computes with the attention mask itself (.{name})")


def sdpa_arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call of ``F.scaled_dot_product_attention``."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | kwargs


def causal(row: Any, head: Any, query: Any, key: Any) -> Tensor:
    """Let a token attend to itself and to all tokens before."""
    return key <= query


def everything(row: Any, head: Any, query: Any, key: Any) -> Tensor:
    """Let a token attend to the whole row."""
    return (query >= 0) & (key >= 0)


def shorter_than(function: MaskFunction, window: int) -> MaskFunction:
    """Restrict a mask to keys less than ``window`` places before their query."""

    def inside(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        return function(row, head, query, key) & (query - key < window)

    return inside


def in_chunks(function: MaskFunction, chunk: int) -> MaskFunction:
    """Restrict a mask to queries and keys of one run of ``chunk`` places."""

    def inside(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        return function(row, head, query, key) & (query // chunk == key // chunk)

    return inside


def within(function: MaskFunction, documents: Tensor) -> MaskFunction:
    """Restrict a mask to queries and keys of one document; ``documents``: (rows, length)."""

    def inside(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        return function(row, head, query, key) & (documents[row, query] == documents[row, key])

    return inside


def in_segments(function: MaskFunction, positions: Tensor, segments: Tensor) -> MaskFunction:
    """Apply a mask to positions instead of places, within segments, as transformers does for packed rows.

    Args:
        positions, segments: (rows, length).
    """

    def inside(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        allowed = function(row, head, positions[row, query], positions[row, key])
        return allowed & (segments[row, query] == segments[row, key])

    return inside


def segments_of(positions: Tensor) -> Tensor | None:
    """Number the runs of consecutive positions, (rows, length) -> (rows, length); None where each row is one run."""
    breaks = torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1
    return breaks.cumsum(1) if bool(breaks.any()) else None


def dense(function: MaskFunction, queries: Tensor, length: int, rows: int, padding: Tensor | None = None) -> Tensor:
    """Evaluate a mask: (rows or 1, 1, queries, length) bool.

    Args:
        queries: (rows or 1, n) int64, the places of queries.
        length: number of keys, at the places 0, 1, 2 …
        rows: rows of the batch.
        padding: (rows, length) bool, False for keys that nobody attends to.
    """
    device = queries.device
    keys = torch.arange(length, device=device)[None, None, None, :]
    row = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    allowed = function(row, head, queries[:, None, :, None], keys)
    if padding is not None:
        allowed = allowed & padding[:, None, None, :]
    return allowed.expand(-1, 1, queries.shape[1], length)
