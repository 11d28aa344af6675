"""Define the manifest of a checkpoint: a JSON file, written last, that describes the other files."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import inside, sync_folder

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
    """The manifest of a checkpoint.

    Attributes:
        tensors: key -> global shape and dtype.
        files: file name -> size and checksum.
        optimizer: class of the optimizer, "" where none was saved.
        groups: the optimizer's groups: names of their parameters, and their options.
        extra: JSON values that the caller gave to ``save``.
        loss_scale: state of the float16 loss scale, empty where the loss was not scaled.
        plan: the plan of the layout that wrote the checkpoint, as JSON text; for people, never needed to read the
            rest.
        left_out: names of frozen parameters that were not saved.
        model: what the model is (``ModelOrigin``), as JSON values; empty in older checkpoints.
        base: name of a parameter that was left out -> a run of its numbers (``save.run_of``).
        in_4_bits: name of a frozen weight that the model held in 4 bits -> dtype in which it was rounded.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    optimizer: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    plan: str = ""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    in_4_bits: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest with a checksum of its own, and flush it to disk."""
        content = json.loads(json.dumps({"version": VERSION, **asdict(self)}))
        with open(folder / NAME, "w") as file:
            file.write(json.dumps({**content, "crc32": _checksum(content)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint folder.

        Raises:
            IntegrityError: there is none (the folder was never finished), or it is not what ``write`` wrote.
            ConfigError: the manifest is a link to a place outside the folder.
        """
        path = inside(folder, NAME)
        if not path.is_file():
            unfinished = (
                "is no checkpoint: it has no manifest, which is written last, so its writing was never finished"
            )
            raise IntegrityError(f"{folder} {unfinished if folder.is_dir() else 'does not exist'}")
        try:
            content = json.loads(path.read_text())
            if content["version"] != VERSION:
                raise IntegrityError(
                    f"{path} has format version {content['version']}; this meshwright reads version {VERSION}"
                )
            if content.pop("crc32") != _checksum(content):
                raise ValueError("its content changed since it was written (checksum)")
            content["tensors"] = {
                key: TensorEntry(tuple(entry["shape"]), entry["dtype"]) for key, entry in content["tensors"].items()
            }
            content["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            tensors, files = content["tensors"], content["files"]
            sizes = [size for entry in tensors.values() for size in entry.shape]
            sizes += [number for entry in files.values() for number in (entry.bytes, entry.crc32)]
            if not all(type(number) is int and number >= 0 for number in sizes):
                raise TypeError("a size is no whole number")
            for entry in tensors.values():
                if not isinstance(getattr(torch, entry.dtype, None), torch.dtype):
                    raise ValueError(f"{entry.dtype} is no dtype")
            for record in content["groups"]:
                if not (
                    all(isinstance(name, str) for name in record["params"]) and isinstance(record["options"], dict)
                ):
                    raise TypeError("a group of the optimizer is none")
            if not (
                isinstance(content["extra"], dict)
                and isinstance(content["optimizer"], str)
                and isinstance(content["plan"], str)
                and all(isinstance(name, str) for name in content.get("left_out", []))
                and isinstance(content.get("model", {}), dict)
                and isinstance(content.get("base", {}), dict)
                and isinstance(in_4_bits := content.get("in_4_bits", {}), dict)
                and all(isinstance(dtype, str) for dtype in in_4_bits.values())
            ):
                raise TypeError("extra, optimizer, plan, left_out, model, base or in_4_bits is of another type")
            return cls(**{own.name: content[own.name] for own in fields(cls) if own.name in content})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                f"{path} is damaged ({type(error).__name__}: {error}); this checkpoint cannot be trusted"
            ) from error


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def describe_file(path: Path) -> FileEntry:
    """Return size and CRC-32 of a file."""
    total, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            total += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileEntry(total, crc)


def damage(folder: Path, name: str, entry: FileEntry) -> str:
    """Say what is wrong with one file of a checkpoint ("" when it is as it was written)."""
    try:
        path = inside(folder, name, NAME)
    except ConfigError as error:
        return str(error)
    if path.parent != folder:
        return f"{folder / NAME} names {name!r}, and a checkpoint has no folders in it"
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{path} has {size:,} bytes, but {entry.bytes:,} were written"
    if describe_file(path) != entry:
        return f"{path} has the right size, but its content changed since it was written (checksum)"
    return ""


def strangers(folder: Path, files: dict[str, FileEntry]) -> list[str]:
    """List tensor files in a checkpoint folder that are not its own: whoever reads all would take them for shards."""
    return [
        f"{path} is not a file of this checkpoint"
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in files
    ]
