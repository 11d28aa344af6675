"""Write, check and open a corpus on disk.

A corpus is a folder with these files for each split (``training``, ``validation``):

- ``<split>.tokens``: the concatenated ids of its documents; little-endian uint16 where the vocabulary has at most
  65,536 ids, else uint32
- ``<split>.offsets``: little-endian int64, where each document begins, and at the end the number of tokens
- ``<split>.learnt``: uint8 per token, 1 where the token is learnt; only where samples hold whole documents
  (conversations)

where conversations have images, the files of ``pictures`` (paths and sizes, no pixels),

and ``meta.json``: Meta, written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import sync_folder
from meshwright.data.images.files import ImageFile
from meshwright.data.text.preference import TASK as PREFERENCE

from .arrays import Pictures, PicturesWriter, array_file, mapped, open_pictures
from .packing import Corpus, Split, Stream, Whole
from .pictured import Pairs, Pictured

VERSION = 3
META = "meta.json"
MOST_FILES = 10_000
TRAINING, VALIDATION = "training", "validation"

TooLong = Literal["refuse", "truncate", "skip"]

Encoded = tuple[str, np.ndarray, np.ndarray | None, Sequence[tuple[int, int, ImageFile]]]
"""A document: its split, its ids, a mask of the ids that are learnt (None: all), and its images, each with its first
token and the token behind its last."""


@dataclass
class SplitSize:
    """The sizes and digests of a split's files."""

    n_documents: int = 0
    n_tokens: int = 0
    n_learnt: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    """blake2b digest of each array file."""


@dataclass(frozen=True)
class Meta:
    """The inputs of a corpus and the sizes of its files."""

    version: int
    key: str
    """Digest of the tokenizer, the task, the names and contents of the files, and the fraction held out."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    end_of_document: int
    dtype: str
    """dtype of the ids in numpy's notation: ``<u2`` or ``<u4``."""
    task: str
    is_whole: bool
    """True if samples hold whole documents."""
    validation_fraction: float
    n_source_bytes: int
    skipped: dict[str, int]
    """Number of unusable rows left out of each file."""
    training: SplitSize
    validation: SplitSize
    notes: list[str] = field(default_factory=list)
    """Differences between the texts and their tokens, each a sentence."""
    pictures: Pictures | None = None
    """The files of images; None where documents have none."""
    files: list[list[Any]] = field(default_factory=list)
    """Name, bytes, digest and records of each source file; none of a corpus of more than MOST_FILES."""

    @property
    def identity(self) -> str:
        """The key, with the digest of the images where there are any."""
        return f"{self.key}-{self.pictures.digest}" if self.pictures else self.key

    @property
    def n_documents(self) -> int:
        return self.training.n_documents + self.validation.n_documents

    @property
    def n_tokens(self) -> int:
        return self.training.n_tokens + self.validation.n_tokens

    def sizes(self) -> dict[str, int]:
        """Return the expected size of each array file in bytes."""
        sizes = {}
        for name, part in ((TRAINING, self.training), (VALIDATION, self.validation)):
            sizes[f"{name}.tokens"] = part.n_tokens * np.dtype(self.dtype).itemsize
            sizes[f"{name}.offsets"] = (part.n_documents + 1) * 8
            if self.is_whole:
                sizes[f"{name}.learnt"] = part.n_tokens
        return sizes | (self.pictures.sizes if self.pictures else {})

    def digests(self) -> dict[str, str]:
        return self.training.digests | self.validation.digests | (self.pictures.digests if self.pictures else {})


def open_tokenised(folder: Path, too_long: TooLong = "refuse", image_folders: Sequence[Path] = ()) -> Corpus:
    """Open a corpus that ``write_corpus`` wrote; see ``cache.open_corpus``."""
    trouble = find_damage(folder)
    if trouble:
        raise IntegrityError(
            f"{folder} holds no whole corpus: {trouble}. Call prepare(...) again: it makes the corpus anew"
        )
    meta = read_meta(folder)

    def split(name: str) -> Split:
        tokens, offsets = mapped(folder / f"{name}.tokens", meta.dtype), mapped(folder / f"{name}.offsets", "<i8")
        if not meta.is_whole:
            return Stream(name, tokens, offsets)
        whole = (name, tokens, offsets, mapped(folder / f"{name}.learnt", "u1"), too_long, meta.end_of_document)
        if meta.pictures:
            return Pictured(*whole, images=open_pictures(folder, name, image_folders))
        return (Pairs if meta.task == PREFERENCE else Whole)(*whole)

    return Corpus(meta, split(TRAINING), split(VALIDATION))


def find_damage(folder: Path, *, contents: bool = False) -> str:
    """Describe the damage to the corpus in ``folder``; return an empty string if the corpus is intact.

    By default only file sizes are checked. ``contents`` also verifies the digests of arrays modified after
    ``meta.json``, which is written last.
    """
    try:
        meta = read_meta(folder)
        written = (folder / META).stat().st_mtime_ns
        if meta.version != VERSION:
            return f"{META} is of version {meta.version}, and this meshwright reads version {VERSION}"
        for name, expected in meta.sizes().items():
            status = (folder / name).stat()
            if status.st_size != expected:
                return f"{name} has {status.st_size} bytes and {META} says {expected}"
            if contents and status.st_mtime_ns > written and _digest_file(folder / name) != meta.digests()[name]:
                return f"the bytes of {name} are not those that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError) as error:
        return f"{META} cannot be read ({error})"
    return ""


def write_corpus(
    folder: Path, documents: Iterable[Encoded], facts: dict[str, Any], image_folders: Sequence[Path] | None = None
) -> Meta:
    """Write ``documents`` into the empty ``folder``, and flush them to disk.

    ``facts`` holds the fields of Meta that are known beforehand; ``image_folders`` those of the documents' images
    (None: documents have none).

    Raises:
        ConfigError: an id is outside [0, vocab_size); casting to a narrower dtype would turn it into another id.
    """
    dtype = np.dtype("<u2" if facts["vocab_size"] <= 1 << 16 else "<u4")
    pictures = None if image_folders is None else PicturesWriter(image_folders)
    with contextlib.ExitStack() as stack:
        writers = {name: _SplitWriter(folder, name, dtype, facts["is_whole"], stack) for name in (TRAINING, VALIDATION)}
        for name, ids, learnt, images in documents:
            if len(ids) and not (ids.min() >= 0 and ids.max() < facts["vocab_size"]):
                raise ConfigError(
                    f"the tokenizer {facts['tokenizer']} gave ids from {ids.min()} to {ids.max()}, and its vocab_size"
                    f" is {facts['vocab_size']}: vocab_size must be one more than the largest id"
                )
            if pictures is not None:
                pictures.add(name, images)
            writers[name].add(ids, learnt)
        parts = {name: writer.close() for name, writer in writers.items()}
    meta = Meta(
        **facts,
        version=VERSION,
        dtype=dtype.str,
        training=parts[TRAINING],
        validation=parts[VALIDATION],
        pictures=pictures.write(folder) if pictures else None,
    )
    write_meta(folder, asdict(meta))
    return meta


def has_documents_of(folder: Path, other: Path) -> bool:
    """Return whether a corpus has every document of another one, as often, in whatever split."""
    return not _documents(other) - _documents(folder)


def _documents(folder: Path) -> Counter[bytes]:
    """Count the documents of both splits of a corpus, by digests of their ids and of what is learnt of them."""
    meta, found = read_meta(folder), Counter[bytes]()
    for name in (TRAINING, VALIDATION):
        tokens, offsets = mapped(folder / f"{name}.tokens", meta.dtype), mapped(folder / f"{name}.offsets", "<i8")
        learnt = mapped(folder / f"{name}.learnt", "u1") if meta.is_whole else tokens[:0]
        bounds = offsets.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            found[hashlib.blake2b(tokens[begin:end].tobytes() + learnt[begin:end].tobytes()).digest()] += 1
    return found


class _SplitWriter:
    """A writer that appends documents to the files of one split."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, is_whole: bool, stack: contextlib.ExitStack):
        self._dtype = dtype
        self._lengths = [0]
        self._n_learnt = 0
        self._files = {
            kind: (f"{name}.{kind}", stack.enter_context(array_file(folder / f"{name}.{kind}")))
            for kind in ("tokens", "offsets", *(("learnt",) if is_whole else ()))
        }

    def add(self, ids: np.ndarray, learnt: np.ndarray | None) -> None:
        self._files["tokens"][1].write(ids.astype(self._dtype))
        if "learnt" in self._files:
            learnt = np.ones(len(ids), dtype=np.uint8) if learnt is None else learnt.astype(np.uint8)
            self._files["learnt"][1].write(learnt)
            self._n_learnt += int(learnt.sum())
        self._lengths.append(len(ids))

    def close(self) -> SplitSize:
        offsets = np.cumsum(self._lengths, dtype="<i8")
        self._files["offsets"][1].write(offsets)
        learnt = self._n_learnt if "learnt" in self._files else int(offsets[-1])
        return SplitSize(
            len(offsets) - 1,
            int(offsets[-1]),
            learnt,
            {name: file.digest.hexdigest() for name, file in self._files.values()},
        )


def write_meta(folder: Path, values: dict[str, Any]) -> None:
    """Write ``meta.json``, and flush the file and the folder's entries to disk."""
    with open(folder / META, "w", encoding="utf-8") as text:
        json.dump(values, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    sync_folder(folder)


def read_meta(folder: Path) -> Meta:
    values = json.loads((folder / META).read_text(encoding="utf-8"))
    if values["version"] != VERSION:
        return Meta(**{f.name: values.get(f.name) for f in fields(Meta)})
    for name in (TRAINING, VALIDATION):
        values[name] = SplitSize(**values[name])
    if values.get("pictures"):
        values["pictures"] = Pictures(**values["pictures"])
    return Meta(**{field.name: values[field.name] for field in fields(Meta) if field.name in values})


def _digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
