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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.files import sync_folder

from .formats import digest_of
from .images import IMAGES, ImageFile, has_changed
from .packing import Corpus, Rows, Split, Stream, Whole
from .tasks import TASK as PREFERENCE

# --- write arrays to files with their digests, and map them into memory


def mapped(path: Path, dtype: str) -> np.ndarray:
    """Map a file as an array; an empty file, which cannot be mapped, gives an empty array."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype=dtype)


class ArrayFile:
    """A file that arrays are appended to, with the digest of its contents."""

    def __init__(self, file: BinaryIO):
        self.digest = hashlib.blake2b(digest_size=16)
        self._file = file

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self.digest.update(data)
        self._file.write(data)


@contextlib.contextmanager
def array_file(path: Path) -> Iterator[ArrayFile]:
    """Create ``path``, and flush its contents to disk when the block ends without an error."""
    with open(path, "wb") as file:
        yield ArrayFile(file)
        file.flush()
        os.fsync(file.fileno())


# --- keep which images the documents of a corpus have

_FILES, _NAMES, _DIGESTS = "images.files", "images.names", "images.digests"


@dataclass(frozen=True)
class Pictures:
    """The sizes and digests of a corpus's files of images.

    Attributes:
        sizes: bytes of each array file.
        digests: blake2b digest of each array file.
        digest: of the images' paths and contents, the same wherever they lie.
    """

    sizes: dict[str, int]
    digests: dict[str, str]
    digest: str


@dataclass(frozen=True, eq=False)
class PictureList:
    """The images of a split.

    Attributes:
        places: rows of ``<split>.images``.
        files: rows of ``images.files``.
        names: bytes of ``images.names``.
        digests: rows of ``images.digests``.
        folders: of the data files, on this machine.
    """

    places: np.ndarray
    files: np.ndarray
    names: np.ndarray
    digests: np.ndarray
    folders: Sequence[Path] = field(default=())

    def of(self, document: int) -> np.ndarray:
        """Return the rows of a document's images in ``places``."""
        first, last = np.searchsorted(self.places[:, 0], [document, document + 1])
        return self.places[first:last]

    def file(self, number: int) -> ImageFile:
        folder, end, width, height, n_bytes, mtime_ns = self.files[number].tolist()
        begin = int(self.files[number - 1, 1]) if number else 0
        name = self.names[begin:end].tobytes().decode("utf-8", "surrogateescape")
        digest = self.digests[number].tobytes().hex()
        return ImageFile(self.folders[folder], name, width, height, n_bytes, mtime_ns, digest)


NO_PICTURES = PictureList(
    np.empty((0, 4), np.int64), np.empty((0, 6), np.int64), np.empty(0, np.uint8), np.empty((0, 16), np.uint8)
)


class PicturesWriter:
    """Collects the images of a corpus's documents, in their order, from the folders of the data files."""

    def __init__(self, folders: Sequence[Path]):
        self._folders = {folder: number for number, folder in enumerate(folders)}
        self._numbers: dict[tuple[Path, str], int] = {}
        self._files: list[ImageFile] = []
        self._places: dict[str, list[tuple[int, int, int, int]]] = {}
        self._documents: dict[str, int] = {}

    def add(self, split: str, images: Sequence[tuple[int, int, ImageFile]]) -> None:
        """Note the images of a split's next document: (first token, token behind the last, file) of each."""
        document = self._documents.get(split, 0)
        self._documents[split] = document + 1
        rows = self._places.setdefault(split, [])
        for begin, end, file in images:
            number = self._numbers.setdefault((file.folder, file.name), len(self._files))
            if number == len(self._files):
                self._files.append(file)
            rows.append((document, begin, end, number))

    def write(self, folder: Path) -> Pictures:
        """Write the files, and flush them to disk."""
        names = [file.name.encode("utf-8", "surrogateescape") for file in self._files]
        ends = np.cumsum([len(name) for name in names]).tolist()
        facts = [
            (self._folders[file.folder], end, file.width, file.height, file.n_bytes, file.mtime_ns)
            for file, end in zip(self._files, ends, strict=True)
        ]
        arrays = {f"{split}.images": _table(self._places.get(split, []), 4) for split in (TRAINING, VALIDATION)}
        arrays |= {_FILES: _table(facts, 6), _NAMES: np.frombuffer(b"".join(names), dtype=np.uint8)}
        arrays[_DIGESTS] = np.frombuffer(bytes.fromhex("".join(f.digest for f in self._files)), dtype=np.uint8)
        digests = {}
        for name, array in arrays.items():
            with array_file(folder / name) as written:
                written.write(array)
            digests[name] = written.digest.hexdigest()
        whole = hashlib.blake2b(digest_size=16)
        for file, name in zip(self._files, names, strict=True):
            whole.update(name + b"\0" + bytes.fromhex(file.digest))
        return Pictures({name: array.nbytes for name, array in arrays.items()}, digests, whole.hexdigest())


def open_pictures(folder: Path, split: str, folders: Sequence[Path]) -> PictureList:
    """Map the images of a corpus's split into memory; ``folders`` of the data files, in the order as written."""
    return PictureList(
        mapped(folder / f"{split}.images", "<i8").reshape(-1, 4),
        mapped(folder / _FILES, "<i8").reshape(-1, 6),
        mapped(folder / _NAMES, "u1"),
        mapped(folder / _DIGESTS, "u1").reshape(-1, 16),
        folders,
    )


def changed_images(folder: Path, folders: Sequence[Path]) -> list[ImageFile]:
    """Return the images that are gone, or have other bytes than when the corpus was made."""
    known = open_pictures(folder, "training", folders)
    return list(filter(has_changed, map(known.file, range(len(known.files)))))


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(rows, dtype="<i8").reshape(-1, columns)


# --- give conversations with images a row each


@dataclass(frozen=True, eq=False)
class Pictured(Whole):
    """A split of documents with images, each in a row of its own, followed by padding.

    Models that take images keep packed documents apart in no common way, and count positions by images.
    A document that is cut short is cut before an image that would not be whole.
    """

    images: PictureList = NO_PICTURES

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``; with ``images``, the files of each row's images in order."""
        found = super().rows(indexes, seq_len)
        members, _ = self._bins(seq_len)
        files = np.empty(len(found["tokens"]), dtype=object)
        for row, document in enumerate(members[np.asarray(indexes).reshape(-1)].tolist()):
            kept = self.kept_lengths(seq_len)[document]
            places = self.images.of(document)
            files[row] = tuple(self.images.file(number) for number in places[places[:, 2] <= kept, 3].tolist())
        return found | {IMAGES: files}

    def n_images(self, seq_len: int) -> int:
        """Count the images in rows of a length."""
        places = self.images.places
        return int((places[:, 2] <= self.kept_lengths(seq_len)[places[:, 0]]).sum())

    def _cut(self, document: int, seq_len: int) -> int:
        places = self.images.of(document)[:, 1:3].tolist()
        return next((begin for begin, end in places if begin < seq_len < end), seq_len)

    def pack(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        documents = np.flatnonzero(self.kept_lengths(seq_len))
        return documents, np.arange(len(documents) + 1)


def beside_images(corpora: Sequence[Corpus], names: Sequence[str]) -> list[Corpus]:
    """Return the parts of a mixture; where one has images, with each conversation of the others in a row of its own.

    Raises:
        UnsupportedError: another part is plain text, which is packed into rows.
    """
    if not any(isinstance(corpus.training, Pictured) for corpus in corpora):
        return list(corpora)
    for corpus, name in zip(corpora, names, strict=True):
        if not isinstance(corpus.training, Whole):
            raise UnsupportedError(
                f"the part '{name}' of data.mixture is plain text, of which a row packs several documents, and other"
                f" parts have images, with one conversation a row: leave it out, or write it as conversations"
            )
    return [replace(c, training=_alone(c.training), validation=_alone(c.validation)) for c in corpora]


def _alone(split: Split) -> Split:
    """Return a split of whole documents with each in a row of its own."""
    if isinstance(split, Pictured) or not isinstance(split, Whole):
        return split
    return Pictured(split.name, split.tokens, split.offsets, split.is_learnt, split.too_long, split.padding)


# --- give pairs of a better and a worse answer rows of their own, side by side


@dataclass(frozen=True, eq=False)
class Pairs(Whole):
    """A split of documents of which each two are a pair: samples 2i and 2i + 1 are the better and the worse answer.

    Each is a row of its own, followed by padding. A pair with an answer that is longer than a sample meets
    ``too_long`` as a whole, and one of which an answer would be cut away is left out.
    """

    rows_together: ClassVar[int] = 2
    _reference: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def set_reference(self, seq_len: int, log_probs: np.ndarray) -> None:
        """Give each sample of a length its log-probability under a reference, which ``rows`` returns with it."""
        self._reference[seq_len] = log_probs

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``; with ``reference_log_probs``, float64 of shape (rows,), once there is a reference."""
        found = super().rows(indexes, seq_len)
        if seq_len in self._reference:
            found["reference_log_probs"] = self._reference[seq_len][np.asarray(indexes).reshape(-1)]
        return found

    def n_unlearnt(self, seq_len: int) -> int:
        """Return the number of answers that are left out since one of their pair is cut away."""
        return 0 if self.too_long == "skip" else self.n_documents - len(self._bins(seq_len)[0])

    def pack(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        fits = (self.kept_lengths(seq_len) > 0).reshape(-1, 2).all(1)
        documents = np.flatnonzero(np.repeat(fits, 2))
        return documents, np.arange(len(documents) + 1)


VERSION = 5
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
    has_turns: bool = False
    """True if a chat template wrote the documents."""
    pictures: Pictures | None = None
    """The files of images; None where documents have none."""
    files: list[list[Any]] = field(default_factory=list)
    """Name, bytes, digest and records of each source file; none of a corpus of more than MOST_FILES."""

    @property
    def identity(self) -> str:
        """The key, with the digest of the images where there are any."""
        return f"{self.key}-{self.pictures.digest}" if self.pictures else self.key

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
            if contents and status.st_mtime_ns > written and digest_of(folder / name) != meta.digests()[name]:
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
