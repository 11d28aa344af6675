"""Write arrays to files with their digests, and map them into memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np


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
