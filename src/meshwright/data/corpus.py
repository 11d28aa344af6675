"""A tokenised corpus on disk: the files of its folder, how they are written, checked and opened.

- ``tokens.bin``: the ids of all documents, those for training first, each closed by the end-of-document id; little-endian uint16
  where the vocabulary has at most 65,536 ids, else uint32
- ``offsets.bin``: little-endian int64, where each document begins, and at the end the number of tokens
- ``meta.json``: Meta, written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import sync_folder
from meshwright.data.packing import Split

VERSION = 1
TOKENS, OFFSETS, META = "tokens.bin", "offsets.bin", "meta.json"


@dataclass(frozen=True)
class Meta:
    """What a corpus is made of, and how large its files are."""

    version: int
    key: str
    """Digest of the tokenizer, the names and contents of the documents, and the fraction held out."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    end_of_document: int
    dtype: str
    """Of the ids, as numpy writes it: ``<u2`` or ``<u4``."""
    validation_fraction: float
    n_source_bytes: int
    n_documents: int
    n_training_documents: int
    n_tokens: int
    n_training_tokens: int
    digests: dict[str, str]
    """blake2b of each array file."""

    def sizes(self) -> dict[str, int]:
        """Bytes that each array file must have."""
        return {TOKENS: self.n_tokens * np.dtype(self.dtype).itemsize, OFFSETS: (self.n_documents + 1) * 8}


@dataclass(frozen=True, eq=False)
class Corpus:
    """An opened corpus: two splits over one memory-mapped array."""

    meta: Meta
    training: Split
    validation: Split
    """May be empty: no documents, no tokens."""


def open_corpus(folder: str | Path) -> Corpus:
    """Map the corpus in ``folder`` (see ``prepare``) into memory, read-only. Reads only what is used.

    Raises:
        IntegrityError: there is no whole corpus in ``folder``.
    """
    folder = Path(folder)
    trouble = find_damage(folder)
    if trouble:
        raise IntegrityError(f"{folder} holds no whole corpus: {trouble}. Call prepare(...) again: it makes the corpus anew")
    meta = read_meta(folder)
    offsets = np.asarray(np.memmap(folder / OFFSETS, dtype="<i8", mode="r"))
    tokens = np.asarray(np.memmap(folder / TOKENS, dtype=meta.dtype, mode="r"))
    first, cut = meta.n_training_documents, meta.n_training_tokens
    return Corpus(
        meta,
        training=Split("training", tokens[:cut], offsets[: first + 1]),
        validation=Split("validation", tokens[cut:], offsets[first:] - cut),
    )


def find_damage(folder: Path, *, contents: bool = False) -> str:
    """What is wrong with the corpus in ``folder``, in words; empty when it is whole. ``contents`` reads the arrays, else sizes only."""
    try:
        meta = read_meta(folder)
        if meta.version != VERSION:
            return f"{META} is of version {meta.version}, and this meshwright reads version {VERSION}"
        for name, expected in meta.sizes().items():
            size = (folder / name).stat().st_size
            if size != expected:
                return f"{name} has {size} bytes and {META} says {expected}"
            if contents and _digest_file(folder / name) != meta.digests[name]:
                return f"the bytes of {name} are not those that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError) as error:
        return f"{META} cannot be read ({error})"
    return ""


def write_corpus(folder: Path, documents: Iterable[np.ndarray], facts: dict) -> Meta:
    """Write ``documents`` (ids without an end), training first, into the empty ``folder``, and see that the disk has them.

    ``facts`` are the fields of Meta that are known beforehand, ``n_training_documents`` among them.

    Raises:
        ConfigError: an id outside [0, vocab_size), which a smaller dtype would turn into another id.
    """
    dtype = np.dtype("<u2" if facts["vocab_size"] <= 1 << 16 else "<u4")
    end = np.array([facts["end_of_document"]], dtype=dtype)
    lengths = [0]
    with _array_file(folder / TOKENS) as file:
        for ids in documents:
            if len(ids) and not (ids.min() >= 0 and ids.max() < facts["vocab_size"]):
                raise ConfigError(
                    f"the tokenizer {facts['tokenizer']} gave ids from {ids.min()} to {ids.max()}, and its vocab_size is"
                    f" {facts['vocab_size']}: vocab_size must be one more than the largest id"
                )
            file.write(ids.astype(dtype))
            file.write(end)
            lengths.append(len(ids) + 1)
    offsets = np.cumsum(lengths, dtype="<i8")
    with _array_file(folder / OFFSETS) as offsets_file:
        offsets_file.write(offsets)
    meta = Meta(
        **facts,
        version=VERSION,
        dtype=dtype.str,
        n_documents=len(offsets) - 1,
        n_tokens=int(offsets[-1]),
        n_training_tokens=int(offsets[facts["n_training_documents"]]),
        digests={TOKENS: file.digest.hexdigest(), OFFSETS: offsets_file.digest.hexdigest()},
    )
    with open(folder / META, "w", encoding="utf-8") as text:
        json.dump(asdict(meta), text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    sync_folder(folder)
    return meta


class _ArrayFile:
    """A file that arrays are appended to, with the digest of what went in."""

    def __init__(self, file: BinaryIO):
        self.digest = hashlib.blake2b(digest_size=16)
        self._file = file

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self.digest.update(data)
        self._file.write(data)


@contextlib.contextmanager
def _array_file(path: Path) -> Iterator[_ArrayFile]:
    """Make ``path``; its contents are on the disk when the block ends without an error."""
    with open(path, "wb") as file:
        yield _ArrayFile(file)
        file.flush()
        os.fsync(file.fileno())


def read_meta(folder: Path) -> Meta:
    values = json.loads((folder / META).read_text(encoding="utf-8"))
    return Meta(**{field.name: values[field.name] for field in fields(Meta)})


def _digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
