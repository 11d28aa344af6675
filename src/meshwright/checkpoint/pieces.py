"""Write a state's pieces as safetensors files, each block of bytes once, and find them by their hashes. Torch-free.

A pack is one safetensors file with pieces of many tensors (https://huggingface.co/docs/safetensors: eight bytes with
the length of a header in JSON, the header, the bytes). Pieces are cut into blocks of whole rows, at the same rows in
any layout: a block is the least that is read, proven by its hash, or referred to where an earlier pack has it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import xxhash

from meshwright.core.errors import IntegrityError, UnsupportedError

from .store import Buffer, Store

BLOCK = 1 << 22
"""Bytes of a block at most, unless one row of a tensor has more."""
IDLE = 1 << 16
"""Bytes that may lie idle in a pack, however small it is."""
WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Name of a dtype -> its word in a safetensors header."""
BYTES = {
    name: 1 if word in ("BOOL", "F8_E4M3", "F8_E5M2") else int(word.lstrip("BFIU")) // 8 for name, word in WORDS.items()
}
"""Name of a dtype -> bytes of an element."""


class Piece(Protocol):
    """A box of a whole tensor, with its bytes in memory.

    Attributes:
        key: global name of the tensor.
        offset: global index of the first element.
        dtype: name of torch's dtype, such as "bfloat16".
        data: the elements, row by row, as one run of bytes (uint8); it may be asked for more than once.
    """

    @property
    def key(self) -> str: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def data(self) -> Buffer: ...


@dataclass(frozen=True)
class PieceEntry:
    """Where the bytes of a box of a tensor are stored.

    Attributes:
        pack: name of the file beside the manifest, or "step-…/file" for one of another checkpoint of the run.
        begin, end: range of bytes in the file.
        hash: of these bytes (``hash_of``); "" in a checkpoint of version 1, whose files have checksums as a whole.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    pack: str
    begin: int
    end: int
    hash: str


Known = Mapping[tuple[str, int], PieceEntry]
"""(hash, number of bytes) -> an entry that has such bytes, its pack as named from the folder that is written."""


new_hash = xxhash.xxh3_128
"""A 128-bit XXH3, ``update`` by ``update``: it finds damage and equal bytes, and no forger."""


def hash_of(data: Buffer) -> str:
    """Return the ``new_hash`` of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def blocks_of(offset: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the rows (from, to), counted in the piece, of each block; a tensor without dims has one row."""
    rows, row = (shape[0], math.prod(shape[1:]) * itemsize) if shape else (1, itemsize)
    per_block = 1 << max(0, (BLOCK // max(row, 1)).bit_length() - 1)
    first = offset[0] if shape else 0
    edges = [first, *range((first // per_block + 1) * per_block, first + rows, per_block), first + rows]
    yield from ((low - first, high - first) for low, high in pairwise(edges) if high > low)


def write_pieces(
    store: Store,
    folder: str,
    pack_name: str,
    pieces: Iterable[Piece],
    known: Known = MappingProxyType({}),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[PieceEntry]:
    """Write the blocks that no pack in ``known`` has into one new pack, whole on disk, and return all entries.

    Nothing is written where nothing is new. A pack of which these pieces need less than half is not referred to: it
    would stay whole for the rest. The bytes of a piece are read twice, for the hash and for the file.

    Args:
        folder: the checkpoint's folder in the store.
        sizes: bytes of the packs in ``known``.

    Raises:
        UnsupportedError: safetensors has no word for a dtype.
        IntegrityError: a piece's bytes changed between the two.
        OSError: the store fails.
    """
    blocks: list[tuple[Piece, int, int, tuple[str, int]]] = []  # piece, its rows from, to, what they are known by
    for piece in sorted(pieces, key=lambda piece: -_itemsize(piece)):  # so that every tensor in the file is aligned
        row, data = math.prod(piece.shape[1:]) * _itemsize(piece), memoryview(piece.data)
        for low, high in blocks_of(piece.offset, piece.shape, _itemsize(piece)):
            blocks.append((piece, low, high, (hash_of(data[low * row : high * row]), (high - low) * row)))
    used = Counter[str]()
    for key in {key for *_, key in blocks if key in known}:
        used[known[key].pack] += key[1]
    idle = {pack for pack, size in sizes.items() if size - used[pack] > max(size // 2, IDLE)}
    known = {key: entry for key, entry in known.items() if entry.pack not in idle}
    entries: list[PieceEntry] = []
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    new: list[tuple[Piece, int, int, str]] = []  # piece, its bytes from, to, their hash
    end, run, before = 0, None, None
    for piece, low, high, key in blocks:
        offset, shape, (digest, size) = piece.offset, piece.shape, key
        row = size // (high - low)
        if shape:
            offset, shape = (offset[0] + low, *offset[1:]), (high - low, *shape[1:])
        if key in known:
            there, run = known[key], None
            entries.append(PieceEntry(piece.key, offset, shape, there.pack, there.begin, there.end, digest))
            continue
        entries.append(PieceEntry(piece.key, offset, shape, "", end, end + size, digest))
        known[key] = entries[-1]
        new.append((piece, low * row, high * row, digest))
        end += size
        if run is None or piece is not before:
            name = piece.key if not any(offset) else f"{piece.key}@{','.join(map(str, offset))}"
            run = header[name] = {"dtype": WORDS[piece.dtype], "shape": shape, "data_offsets": (end - size, end)}
        else:
            run["shape"] = (run["shape"][0] + high - low, *shape[1:])
            run["data_offsets"] = (run["data_offsets"][0], end)
        before = piece
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin = 8 + len(encoded)

    def content() -> Iterator[Buffer]:
        yield len(encoded).to_bytes(8, "little") + encoded
        held, data = None, memoryview(b"")
        for piece, low, high, digest in new:
            if piece is not held:
                held, data = piece, memoryview(piece.data)
            if hash_of(part := data[low:high]) != digest:
                raise IntegrityError(
                    f"{piece.key} changed in memory while it was written to {store.where(f'{folder}/{pack_name}')}"
                )
            yield part

    if new:
        store.write(f"{folder}/{pack_name}", content())
    return [
        replace(entry, pack=pack_name, begin=begin + entry.begin, end=begin + entry.end) if not entry.pack else entry
        for entry in entries
    ]


def _itemsize(piece: Piece) -> int:
    if piece.dtype not in BYTES:
        raise UnsupportedError(
            f"{piece.key} is {piece.dtype}, and a checkpoint holds {', '.join(WORDS)}: convert it to one of these"
        )
    return BYTES[piece.dtype]
