"""Read and write named files of a folder on disk, or of one that fsspec reaches (s3://, gs://, memory://). Torch-free.

A name is a path below the store's root, with slashes. A put is atomic: a reader finds the old content, the new, or
none. Nothing here is collective.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError
from meshwright.core.files import inside, sync_folder

Buffer = Any
"""Whatever shares its memory as bytes: bytes, memoryview, a contiguous array of uint8."""


@dataclass(frozen=True)
class LocalStore:
    """The files below a folder on disk.

    A name that leaves the folder, or a link that does, is refused.
    """

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def location(self, folder: str) -> Path:
        """Return the path of a folder."""
        return self.root / folder

    def where(self, name: str) -> str:
        """Return the path or address of a file, for people."""
        return str(self.root / name)

    def files(self, folder: str = "") -> dict[str, int]:
        """Map the names of the files in a folder, not in its folders, to their sizes; of no folder: {}."""
        try:
            with os.scandir(self.root / folder) as found:
                rows = [(entry.name, entry.stat()) for entry in found if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {f"{folder}/{name}" if folder else name: about.st_size for name, about in rows}

    def folders(self) -> list[str]:
        """List the names of the folders at the root."""
        return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir()) if self.root.is_dir() else []

    def read(self, name: str) -> bytes:
        """Return a whole file. Raises FileNotFoundError, OSError."""
        return inside(self.root, name).read_bytes()

    def read_into(self, name: str, begin: int, buffer: Buffer) -> None:
        """Fill a buffer with the bytes of a file from ``begin`` on. Raises OSError where the file ends before."""
        view = memoryview(buffer)
        with open(inside(self.root, name), "rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    raise OSError(f"{self.where(name)} ends after {begin + done:,} bytes")
                done += got

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write a new file, one part after the other, and flush it to disk; its name may show before it is whole."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        sync_folder(path.parent)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file that is whole on disk before it has its name."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new-{os.getpid()}")
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync_folder(path.parent)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the folders that they leave empty; those that are gone already are passed over."""
        places = [self.root / name for name in names]
        for place in places:
            place.unlink(missing_ok=True)
        for folder in {place.parent for place in places} - {self.root}:
            with suppress(OSError):
                folder.rmdir()


Store = LocalStore
Location = Path | str
"""A folder on disk, or an address like s3://bucket/run/step-00000100."""


def place_of(location: Location) -> tuple[Store, str]:
    """Return the store that holds a checkpoint's folder, and the folder's name in it."""
    path = Path(os.path.abspath(location))
    return LocalStore(path.parent), path.name
