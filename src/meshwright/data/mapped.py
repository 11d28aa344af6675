"""Index files of token ids, and use them in place.

Each file is read once, to check the ids and find the documents. In the first two formats a document ends with the
tokenizer's end-of-document id:

- ``.npy``: one 1-D integer array
- ``.bin``: concatenated ids, in a dtype that the user specifies
- Megatron's ``.bin`` with ``.idx``: the index holds the dtype and the documents
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError, nearest
from meshwright.core.files import inside

from .corpus import META, TRAINING, VALIDATION, array_file, write_meta
from .formats import digest_of_bytes
from .options import SourceOptions
from .packing import Corpus, Joined, Stream
from .scan import Scan
from .tokenizers import Tokenizer

VERSION = 2
PREFIX = "index-"
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_CHUNK = 1 << 24
"""Number of ids that are checked at a time."""

_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class MappedFile:
    """An array of ids inside a file."""

    path: str
    n_bytes: int
    changed_ns: int
    dtype: str
    begin: int
    """Byte offset at which the ids begin."""
    n_tokens: int
    n_documents: int
    digest: str = ""  # blake2b digest of the ids

    def open(self) -> np.ndarray:
        """Map the ids into memory, read-only."""
        if not self.n_tokens:
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.begin, shape=(self.n_tokens,)))


@dataclass(frozen=True)
class Index:
    """The index of a corpus of token id files."""

    version: int
    key: str
    """Digest of the ids, the document offsets, the end-of-document id and the fraction held out."""
    vocab_size: int
    end_of_document: int
    validation_fraction: float
    files: tuple[MappedFile, ...]
    n_training_tokens: int
    """Number of ids to train on, in the order of the files; the ids that follow are held out."""

    @property
    def n_tokens(self) -> int:
        return sum(file.n_tokens for file in self.files)


def read_index(folder: Path) -> Index:
    values = json.loads((folder / META).read_text(encoding="utf-8"))
    values["files"] = tuple(MappedFile(**file) for file in values["files"])
    return Index(**{field.name: values[field.name] for field in fields(Index)})


def find_damage(folder: Path) -> str:
    """Describe the damage to the index in ``folder``; return an empty string if it is intact and no file changed."""
    try:
        index = read_index(folder)
        if index.version != VERSION:
            return f"{META} is of version {index.version}, and this meshwright reads version {VERSION}"
        for number, file in enumerate(index.files):
            status = Path(file.path).stat()
            if (status.st_size, status.st_mtime_ns) != (file.n_bytes, file.changed_ns):
                return f"{file.path} changed"
            size = (folder / f"{number}.offsets").stat().st_size
            if size != (file.n_documents + 1) * 8:
                return f"{number}.offsets has {size} bytes and {META} says {(file.n_documents + 1) * 8}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError) as error:
        return f"{META} cannot be read ({error})"
    return ""


class IndexingRecipe:
    """The recipe for the index of token id files.

    The folder name depends on the files' paths, sizes and time stamps, so their contents are read only once.

    Raises:
        ConfigError: a file does not conform to its format.
    """

    def __init__(self, scan: Scan, options: SourceOptions, tokenizer: Tokenizer, fraction: float):
        if options.task not in ("auto", "text"):
            raise ConfigError(f"data.task = '{options.task}' needs records, and {scan.format} files hold token ids")
        self.tokenizer, self.fraction, self.format = tokenizer, fraction, scan.format
        self._documents: dict[str, np.ndarray] = {}
        files = []
        for path in (file.path for file in scan.files):
            if scan.format == "npy":
                try:
                    array = np.lib.format.open_memmap(path, mode="r")
                except (
                    ValueError,
                    OSError,
                    SyntaxError,
                    RecursionError,
                    MemoryError,
                    OverflowError,
                    TypeError,
                ) as error:
                    raise ConfigError(f"data.source: {path} is no .npy file that numpy reads: {error}") from error
                if array.ndim != 1 or array.dtype.kind not in "ui":
                    raise ConfigError(
                        f"data.source: {path} holds an array of shape {array.shape} and dtype {array.dtype}; it must be"
                        f" 1-D, of whole numbers (numpy.save('{path.name}', array.reshape(-1).astype('uint16')))"
                    )
                files.append(_mapped(path, array.dtype.str, int(array.offset), len(array)))
            elif scan.format == "bin":
                dtype = options.dtype
                if dtype not in DTYPES:
                    problem = f"data.dtype = {dtype!r} is none of them.{nearest(dtype, DTYPES)}"
                    raise ConfigError(
                        f"data.source: {path} does not say of which dtype its ids are,"
                        f" {problem if dtype else 'and data.dtype is empty.'} Legal: {', '.join(DTYPES)}"
                    )
                size, width = path.stat().st_size, np.dtype(dtype).itemsize
                if size % width:
                    raise ConfigError(
                        f"data.source: {path} has {size} bytes, which are no whole number of ids of data.dtype ="
                        f" '{dtype}' ({width} bytes each)"
                    )
                files.append(_mapped(path, np.dtype(dtype).newbyteorder("<").str, 0, size // width))
            else:
                file, documents = _megatron(path)
                self._documents[file.path] = documents
                files.append(file)
        self.files = tuple(files)

    @property
    def folder_name(self) -> str:
        made_of: list[object] = [
            VERSION,
            self.format,
            self.tokenizer.vocab_size,
            self.tokenizer.end_of_document,
            float(self.fraction),
        ]
        for file in self.files:
            documents = self._documents.get(file.path)
            known = "" if documents is None else digest_of_bytes(documents.tobytes())
            made_of.append([file.path, file.n_bytes, file.changed_ns, file.dtype, file.begin, known])
        return PREFIX + digest_of_bytes(json.dumps(made_of).encode("utf-8", "surrogateescape"))

    def documents(self, file: MappedFile, ids: np.ndarray) -> list[np.ndarray]:
        """Split the first ids of a file into one array per document."""
        offsets = self._documents.get(file.path)
        cuts = (
            np.flatnonzero(ids == self.tokenizer.end_of_document) + 1
            if offsets is None
            else offsets[1:-1][offsets[1:-1] < len(ids)]
        )
        return [part for part in np.split(ids, cuts) if len(part)]

    find_damage = staticmethod(find_damage)
    read_meta = staticmethod(read_index)

    def build(
        self, folder: Path, target: Path, say: Callable[[str], None], progress: Callable[[int, int], None]
    ) -> None:
        """Read every id and write the index.

        Raises:
            ConfigError: an id is outside the vocabulary; the message has its file and position.
        """
        total, done = sum(file.n_tokens for file in self.files), 0
        say(f"indexing {total} token ids of {len(self.files)} files into {target}")
        all_offsets, files = [], []
        key = hashlib.blake2b(
            json.dumps([VERSION, self.tokenizer.end_of_document, float(self.fraction)]).encode(), digest_size=16
        )
        for number, file in enumerate(self.files):
            digest, ends = hashlib.blake2b(digest_size=16), []
            every = file.open()
            for begin in range(0, len(every), _CHUNK):
                ids = every[begin : begin + _CHUNK]
                self.check(file, begin, ids)
                digest.update(np.ascontiguousarray(ids).view(np.uint8).data)
                if file.path not in self._documents:
                    ends.append(np.flatnonzero(ids == self.tokenizer.end_of_document) + begin + 1)
                done += len(ids)
                progress(done, total)
            offsets = self._documents.get(file.path)
            if offsets is None:
                offsets = np.unique(np.concatenate([[0], *ends, [file.n_tokens]])).astype("<i8")
            with array_file(folder / f"{number}.offsets") as written:
                written.write(offsets.astype("<i8"))
            key.update(digest.digest() + written.digest.digest())
            all_offsets.append(offsets)
            values = {**asdict(file), "n_documents": len(offsets) - 1, "digest": digest.hexdigest()}
            files.append(MappedFile(**values))
        n_training, before = total, 0
        if self.fraction:  # rounded up to a document's end that leaves something to hold out
            n_training = wanted = round(total * (1 - self.fraction))
            for own in all_offsets:
                if before + int(own[-1]) >= wanted:
                    near = before + int(own[np.searchsorted(own, wanted - before)])
                    n_training = near if near < total else wanted
                    break
                before += int(own[-1])
        index = Index(
            VERSION,
            key.hexdigest(),
            self.tokenizer.vocab_size,
            self.tokenizer.end_of_document,
            float(self.fraction),
            tuple(files),
            n_training,
        )
        write_meta(folder, asdict(index))
        say(f"{index.n_training_tokens} tokens to train on, {index.n_tokens - index.n_training_tokens} held out")

    def check(self, file: MappedFile, begin: int, ids: np.ndarray) -> None:
        """Raise ConfigError unless ``ids``, which begin at position ``begin`` of ``file``, are in the vocabulary."""
        vocabulary = self.tokenizer.vocab_size
        if not len(ids) or (ids.min() >= 0 and ids.max() < vocabulary):
            return
        place = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        raise ConfigError(
            f"data.source: {file.path} holds the id {int(ids[place])} at position {begin + place} of {file.n_tokens},"
            f" outside the vocabulary of {self.tokenizer!r} (0 to {vocabulary - 1}). Set data.tokenizer to the one that"
            f" made the file (or 'ids:VOCABULARY:END', without its"
            f" texts){', and see whether data.dtype is right' if file.path.endswith('.bin') else ''}"
        )


def open_index(folder: Path) -> Corpus:
    """Open the corpus of an index, with its files memory-mapped.

    Raises:
        IntegrityError: the index is damaged, or a file changed.
    """
    trouble = find_damage(folder)
    if trouble:
        raise IntegrityError(
            f"{folder} is not a valid index of its files: {trouble}. Call prepare(...) again: it makes the index anew"
        )
    index = read_index(folder)
    parts: dict[str, list[Stream]] = {TRAINING: [], VALIDATION: []}
    before = 0
    for number, file in enumerate(index.files):
        tokens, offsets = file.open(), np.fromfile(folder / f"{number}.offsets", dtype="<i8")
        cut = min(max(index.n_training_tokens - before, 0), file.n_tokens)
        for name, begin, end in ((TRAINING, 0, cut), (VALIDATION, cut, file.n_tokens)):
            if begin < end:
                inside = offsets[np.searchsorted(offsets, begin, "right") : np.searchsorted(offsets, end, "left")]
                parts[name].append(Stream(name, tokens[begin:end], np.concatenate([[begin], inside, [end]]) - begin))
        before += file.n_tokens
    return Corpus(index, Joined(TRAINING, parts[TRAINING]), Joined(VALIDATION, parts[VALIDATION]))


def _mapped(path: Path, dtype: str, begin: int, n_tokens: int) -> MappedFile:
    status = path.stat()
    return MappedFile(str(path.absolute()), status.st_size, status.st_mtime_ns, dtype, begin, n_tokens, 0)


def _megatron(index: Path) -> tuple[MappedFile, np.ndarray]:
    """Find the ids beside ``index``, and where each document begins (int64, with the number of ids at the end)."""
    path, data = inside(index.parent, index.with_suffix(".bin").name), index.read_bytes()
    header = len(_MAGIC) + 25
    if len(data) < header or not data.startswith(_MAGIC):
        raise ConfigError(
            f"data.source: {index} is not an index of Megatron's indexed datasets (it does not begin with MMIDIDX)"
        )
    version, code, n_sequences, n_documents = struct.unpack("<QBQQ", data[len(_MAGIC) : header])
    expected = header + 12 * n_sequences + 8 * n_documents
    if version != 1 or code not in _MEGATRON_DTYPES or len(data) < expected:
        raise ConfigError(
            f"data.source: {index} has version {version}, dtype code {code} and {len(data)} bytes; what is read is"
            f" version 1, the codes {sorted(_MEGATRON_DTYPES)} (whole numbers), and {expected} bytes for its"
            f" {n_sequences} sequences"
        )
    if not path.is_file():
        raise ConfigError(f"data.source: {index} has no {path.name} beside it, which holds the ids")
    lengths = np.frombuffer(data, "<i4", n_sequences, header)
    documents = np.frombuffer(data, "<i8", n_documents, header + 12 * n_sequences)
    if (lengths < 0).any() or (documents < 0).any() or (documents > n_sequences).any():
        raise ConfigError(
            f"data.source: {index} is damaged: it lists a sequence of less than 0 ids, or a document that does not"
            f" exist"
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype, n_tokens = np.dtype(_MEGATRON_DTYPES[code]), int(ends[-1])
    if path.stat().st_size != n_tokens * dtype.itemsize:
        raise ConfigError(
            f"data.source: {path} has {path.stat().st_size} bytes, and {index.name} tells of {n_tokens} ids of"
            f" {dtype.itemsize} bytes: one of the two was cut short"
        )
    offsets = np.unique(np.concatenate([[0], ends[documents], [n_tokens]])).astype(np.int64)
    return _mapped(path, dtype.str, 0, n_tokens), offsets
