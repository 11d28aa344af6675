"""The manifest of a checkpoint: a JSON file, written last, that says what the other files must be."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.errors import IntegrityError

NAME = "manifest.json"
VERSION = 1
CHUNK = 1 << 22


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    tensors: key -> global shape and dtype.
    files: file name -> size and checksum.
    groups: the optimizer's groups: names of their parameters, and their options.
    extra: what the caller gave to ``save`` (JSON values).
    plan: the plan of the layout that wrote it, as JSON text; for people, never needed to read the rest.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    plan: str = ""
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write and flush to disk."""
        with open(folder / NAME, "w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint folder.

        Raises:
            IntegrityError: there is none (the folder was never finished), or it is not what ``write`` writes.
        """
        path = folder / NAME
        if not path.is_file():
            what = "is no checkpoint: it has no manifest, which is written last, so its writing was never finished" if folder.is_dir() else "does not exist"
            raise IntegrityError(f"{folder} {what}")
        try:
            data = json.loads(path.read_text())
            if data["version"] != VERSION:
                raise IntegrityError(f"{path} has format version {data['version']}; this meshwright reads version {VERSION}")
            tensors = {key: TensorEntry(tuple(entry["shape"]), entry["dtype"]) for key, entry in data["tensors"].items()}
            files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
            return cls(tensors, files, data["groups"], data["extra"], data["plan"])
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{path} is damaged ({type(error).__name__}: {error}); this checkpoint cannot be trusted") from error


def describe_file(path: Path) -> FileEntry:
    """Size and CRC-32 of a file."""
    total, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            total += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileEntry(total, crc)


def damage(folder: Path, name: str, entry: FileEntry) -> str:
    """What is wrong with one file of a checkpoint ("" when it is as it was written)."""
    path = folder / name
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{path} has {size:,} bytes, but {entry.bytes:,} were written"
    return "" if describe_file(path) == entry else f"{path} has the right size, but its content changed since it was written (checksum)"
