"""Describe which tokens of a row attend to which, by their places in the row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import by_values

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
    """Apply a mask to (rows, length) positions, not places, within segments, as transformers does for packed rows."""

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


@dataclass(frozen=True)
class MaskRule:
    """A mask by places.

    Attributes:
        causal: a token attends to itself and earlier tokens only.
        window: number of tokens that a token attends to, itself included; 0: all.
        chunk: tokens attend within runs of this many places; 0: within the whole row.
        documents: tokens attend within their document only, by the batch's ``document_ids``.
    """

    causal: bool = True
    window: int = 0
    documents: bool = False
    chunk: int = 0

    @property
    def places(self) -> MaskFunction:
        """The rule without documents."""
        made = causal if self.causal else everything
        made = shorter_than(made, self.window) if self.window else made
        return in_chunks(made, self.chunk) if self.chunk else made

    @property
    def reach(self) -> int:
        """How many tokens before itself a token attends to at most, itself included; 0: the whole row."""
        return self.window or self.chunk if self.causal else 0

    def first(self, place: int) -> int:
        """Return the place of the first key that the query at a place sees in a row without documents."""
        if not self.causal:
            return 0
        start = place - place % self.chunk if self.chunk else 0
        return max(start, place - self.window + 1) if self.window else start

    def function(self, documents: Tensor | None) -> MaskFunction:
        """Return the rule as a function of places, for a batch with these (rows, length) documents."""
        return within(self.places, documents) if self.documents and documents is not None else self.places

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        kind += f" window {self.window}" if self.window else f" in chunks of {self.chunk}" if self.chunk else ""
        return f"{kind} per document" if self.documents else kind


# --- read a mask as one interval of keys for each query, where it is one: so no mask of queries × keys is kept

AT_ONCE = 2**24
"""Pairs of queries and keys that are compared at once."""


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The keys of each query: those at the places [lower, upper) of its row; (rows or 1, queries) int64 each."""

    lower: Tensor
    upper: Tensor

    @by_values
    def take(self, queries: Tensor) -> KeyRanges:
        """Return the reach of some queries, (rows or 1, n) int64 places."""
        rows = max(len(self.lower), len(queries))
        queries = queries.expand(rows, -1)
        lower, upper = (bound.expand(rows, -1).gather(1, queries) for bound in (self.lower, self.upper))
        return KeyRanges(lower, upper)

    @by_values
    def among(self, places: Tensor) -> KeyRanges:
        """Return the reach as numbers of keys at these ascending places, (rows or 1, keys), instead of places."""
        rows = max(len(self.lower), len(self.upper), len(places))
        places = places.expand(rows, -1).contiguous()
        lower, upper = (
            torch.searchsorted(places, bound.expand(rows, -1).contiguous()) for bound in (self.lower, self.upper)
        )
        return KeyRanges(lower, upper)

    def within(self, lower: Tensor, upper: Tensor) -> KeyRanges:
        """Restrict each query to the keys [lower, upper); a query may be left with none."""
        lower = torch.maximum(self.lower, lower)
        return KeyRanges(lower, torch.maximum(torch.minimum(self.upper, upper), lower))


@dataclass(frozen=True, eq=False)
class RowMask:
    """Which tokens of a microbatch's rows attend to which.

    Attributes:
        function: of places; of ``positions`` where given.
        positions: (rows, length) int64, consecutive within a segment.
        segments: (rows, length) int64: tokens attend within their segment only.
        padding: (rows, length) bool, False for tokens that nobody attends to.
        is_known: each query's keys in ``function`` are known to be one interval.
    """

    function: MaskFunction
    positions: Tensor | None = None
    segments: Tensor | None = None
    padding: Tensor | None = None
    is_known: bool = False

    @by_values
    def dense(self, queries: Tensor, length: int, rows: int) -> Tensor:
        """Evaluate the mask for queries at (rows or 1, n) places: (rows or 1, 1, n, length) bool."""
        function = self.function
        if self.segments is not None:
            if self.positions is not None:
                function = in_segments(function, self.positions, self.segments)
            else:
                function = within(function, self.segments)
        return dense(function, queries, length, rows, self.padding)

    @by_values
    def reach(self, length: int, of: Callable[[MaskFunction, int], KeyRanges | None]) -> KeyRanges | None:
        """Return the reach of all tokens of rows; None where the keys of a query are not one interval.

        Args:
            of: gives the reach of ``function`` for a number of places.
        """
        last = -1 if self.positions is None else int(self.positions.max())
        reach = of(self.function, length if last < length else 2 ** last.bit_length())
        if reach is None:
            return None
        if (segments := self.segments) is not None:
            runs = (segments.diff(dim=1, prepend=segments[:, :1]) != 0).cumsum(1)
            if bool((segments.sort(dim=1).values.diff(dim=1) != 0).sum(1).ne(runs[:, -1]).any()):
                return None  # a document that goes on behind another one
            if self.positions is not None:
                shift = torch.arange(segments.shape[1], device=segments.device) - self.positions
                reach = reach.take(self.positions)
                reach = KeyRanges(reach.lower + shift, reach.upper + shift)
            reach = reach.within(torch.searchsorted(runs, runs), torch.searchsorted(runs, runs, right=True))
        if self.padding is not None:
            # the place of each row's first True and that behind its last, (rows, 1) int64 each
            whole = self.padding.to(torch.int64)
            starts = whole.argmax(1, keepdim=True)
            behind = whole.shape[1] - whole.flip(1).argmax(1, keepdim=True)
            ends = torch.where(self.padding.any(1, keepdim=True), behind, starts)
            if bool((self.padding.sum(1) != (ends - starts)[:, 0]).any()):
                return None
            reach = reach.within(starts, ends)
        return reach


def search(
    function: MaskFunction, length: int, rows: int, device: torch.device | str = "cpu", places: Tensor | None = None
) -> KeyRanges | None:
    """Find the ends of each token's interval by bisection, from the token itself; None if it does not see itself.

    Whether keys between the ends are all seen is for ``is_reach`` to say. ``places``: of the tokens; None: all.
    """
    row = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    query = (torch.arange(length, device=device) if places is None else places)[None, None, :, None]
    query_of_each = query.expand(rows, 1, -1, 1)

    def sees(key: Tensor) -> Tensor:
        return function(row, head, query, key).expand_as(query_of_each)

    if not bool(sees(query_of_each).all()):
        return None
    lower = _least(sees, torch.zeros_like(query_of_each), query_of_each)
    last = torch.full_like(query_of_each, length - 1)
    beyond = _least(lambda key: sees(last - key), torch.zeros_like(last), last - query_of_each)
    reach = KeyRanges(lower[:, 0, :, 0], (length - beyond)[:, 0, :, 0])
    same = bool((reach.lower == reach.lower[:1]).all() and (reach.upper == reach.upper[:1]).all())
    return KeyRanges(reach.lower[:1], reach.upper[:1]) if same else reach


def _least(sees: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the least key from which on to ``high``, which is seen, all are seen."""
    while bool((low < high).any()):
        middle = (low + high) // 2
        seen = sees(middle)
        low, high = torch.where(seen, low, middle + 1).minimum(high), torch.where(seen, middle, high)
    return high


def is_reach(function: MaskFunction, reach: KeyRanges, queries: Tensor, length: int, rows: int) -> bool:
    """Compare an interval with every value of the mask, for queries at (rows or 1, n) places."""
    keys = torch.arange(length, device=queries.device)
    for some in queries.split(max(1, AT_ONCE // (length * max(rows, 1))), dim=1):
        mine = reach.take(some)
        expected = (keys >= mine.lower[..., None]) & (keys < mine.upper[..., None])
        if not bool((dense(function, some, length, rows)[:, 0] == expected).all()):
            return False
    return True


def fingerprint(value: Any) -> Any:
    """Return a hashable value that two functions share only if they compute the same; None if that is unknown."""
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)):
        parts = tuple(fingerprint(part) for part in value)
        return None if None in parts else parts
    if isinstance(value, functools.partial):
        return fingerprint((value.func, value.args, tuple(sorted(value.keywords.items()))))
    if isinstance(value, FunctionType):
        cells = fingerprint(tuple(cell.cell_contents for cell in value.__closure__ or ()))
        defaults = fingerprint((value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items()))))
        return None if cells is None or defaults is None else (value.__code__, cells, defaults)
    return None


FAR = (9973, 40_009, 2**17 - 1)
"""Places at which a mask's rule is read; odd, so that they lie inside chunks."""


def rule_of(function: MaskFunction) -> MaskRule | None:
    """Return the rule by which a mask of places reaches: causal, with a window or in chunks, or everything; or None.

    Tensors on meta that the function holds, such as the padding of a batch without values, count as zeros.
    """
    function = replaced(function, lambda x: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x)
    found = [_ends(function, place) for place in FAR]
    candidates = [MaskRule(), MaskRule(causal=False)]
    if (last := found[-1]) is not None and None not in found and last[0] > 0:
        start = last[0]
        before = _ends(function, start - 1)
        if before is not None:
            candidates += [MaskRule(window=FAR[-1] - start + 1), MaskRule(chunk=start - before[0])]
    for rule in candidates:
        if rule.window > 0 or rule.chunk > 0 or rule in candidates[:2]:
            places = [*FAR, *(place + offset for place in FAR for offset in (rule.reach - 1, rule.reach))]
            if all(_ends(function, place) == _ends(rule.places, place) for place in places):
                return rule
    return None


def _ends(function: MaskFunction, place: int) -> tuple[int, int] | None:
    """Return the interval of keys that one query of a row of twice its place reaches."""
    found = search(function, 2 * place + 1, 1, places=torch.tensor([place]))
    return None if found is None else (int(found.lower), int(found.upper))


def replaced(value: Any, instead: Callable[[Tensor], Tensor]) -> Any:
    """Return a mask with each tensor that its functions close over replaced; the mask itself where none is."""
    if isinstance(value, Tensor):
        return instead(value)
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, instead) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if not isinstance(value, FunctionType) or not (value.__closure__ or value.__defaults__):
        return value
    before = [cell.cell_contents for cell in value.__closure__ or ()]
    cells, defaults = replaced(before, instead), replaced(value.__defaults__ or (), instead)
    if cells is before and defaults is (value.__defaults__ or ()):
        return value
    closure = tuple(map(CellType, cells))
    made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, closure)
    made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
    return made
