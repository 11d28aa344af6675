"""Write arrays to files with their digests, and keep which images the documents of a corpus have.

- ``<split>.images``: little-endian int64 of shape (images, 4), in the order of the documents: the document, the first
  token of the image within it, the token behind its last, and the number of the file
- ``images.files``: int64 (files, 6): the number of the folder, the end of its path in ``images.names``, width and
  height in pixels, bytes, and the time of the last change in nanoseconds
- ``images.names``: the paths, UTF-8, one behind the other; ``images.digests``: uint8 (files, 16)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.data.images.files import ImageFile, has_changed

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
    """Collects the images of a corpus's documents, in their order.

    Args:
        folders: of the data files, as ``ImageFile.folder`` has them.
    """

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
        rows += [(document, begin, end, self._number(file)) for begin, end, file in images]

    def _number(self, file: ImageFile) -> int:
        number = self._numbers.setdefault((file.folder, file.name), len(self._files))
        if number == len(self._files):
            self._files.append(file)
        return number

    def write(self, folder: Path, splits: Sequence[str] = ("training", "validation")) -> Pictures:
        """Write the files, and flush them to disk."""
        names = [file.name.encode("utf-8", "surrogateescape") for file in self._files]
        ends = np.cumsum([len(name) for name in names]).tolist()
        facts = [
            (self._folders[file.folder], end, file.width, file.height, file.n_bytes, file.mtime_ns)
            for file, end in zip(self._files, ends, strict=True)
        ]
        arrays = {f"{split}.images": _table(self._places.get(split, []), 4) for split in splits}
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
    """Map the images of a corpus's split into memory.

    Args:
        folders: of the data files, in the order in which they were written.
    """
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
