"""Read slices from a folder's safetensors files in Hugging Face's layout: one file, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.files import inside, refuse_pointer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHERS = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pth")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_HEADER = 100_000_000
"""Limit in bytes, as in the safetensors library."""
Cut = tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """The place, shape and dtype of one tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """The tensors of a folder by name; opening reads and checks the headers only.

    Attributes:
        tensors: the stored tensors by name.
        bytes_read: bytes of all slices requested so far, at the dtype of the file.

    Raises:
        ConfigError: there are no weights, or only pickled ones; a name or a link leads out of the folder.
        IntegrityError: a file is truncated or damaged, or is not there although the index names it.
        UnsupportedError: a dtype that torch has no full arithmetic for.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.tensors = {tensor.name: tensor for file, names in _files(self.folder) for tensor in _header(file, names)}
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}

    def read(self, name: str, cut: Cut) -> Tensor:
        """Read a part of a tensor to the CPU, in the dtype of the file."""
        stored = self.tensors[name]
        if stored.file not in self._open:
            self._open[stored.file] = safetensors.safe_open(stored.file, framework="pt")  # type: ignore[no-untyped-call]
        part = self._open[stored.file].get_slice(name)[cut]
        self.bytes_read += part.numel() * part.element_size()
        return part


def holds_weights(folder: Path) -> bool:
    """Return whether a folder holds weights that can be read.

    Raises:
        ConfigError: it holds weights in another form only; a model of random weights would silently take their place.
    """
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return True
    others = [*(path.name for pattern in OTHERS for path in folder.glob(pattern))] if folder.is_dir() else []
    if others:
        raise ConfigError(
            f"{folder} has weights in {others[0]}, and neither {SINGLE} nor {INDEX}: pickled weights are not read. Save"
            f" them as safetensors (in transformers: from_pretrained(...).save_pretrained(...)), or give a folder with"
            f" the config.json alone to begin anew"
        )
    return False


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each file, and the names that the index lists for it."""
    index = inside(folder, INDEX)
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            by_file: dict[str, set[str]] = {}
            for name, file in weight_map.items():
                by_file.setdefault(file, set()).add(name)
            paths = {file: inside(folder, file, INDEX) for file in by_file}
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{index} is damaged ({type(error).__name__}: {error})") from None
        absent = [file for file in sorted(by_file) if not paths[file].is_file()]
        if absent:
            raise IntegrityError(
                f"{index} names {', '.join(absent)}, and {folder} has no such file: copy it again, whole"
            )
        yield from ((paths[file], names) for file, names in sorted(by_file.items()))
    elif holds_weights(folder):
        yield inside(folder, SINGLE), None
    else:
        raise ConfigError(f"{folder} holds no weights: there is neither {SINGLE} nor {INDEX}")


def _header(path: Path, expected: set[str] | None) -> Iterator[StoredTensor]:
    """Yield the tensors that a file's header lists, after comparing it with the file's size and the index."""
    size = path.stat().st_size
    refuse_pointer(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise ValueError(
                    f"its first eight bytes say that its header has {length:,} bytes, and the file has {size:,}"
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{path} is no whole safetensors file: {error}. Copy it again") from None
    if size != whole:
        raise IntegrityError(
            f"{path} has {size:,} bytes, and its header describes {whole:,}: it is cut short or damaged. Copy it again"
        )
    if expected is not None and (lacking := expected - header.keys()):
        raise IntegrityError(f"{path} lacks {sorted(lacking)[0]} ({len(lacking)} in all), which {INDEX} says it holds")
    try:
        yield from [
            _stored(path, name, entry) for name, entry in header.items() if expected is None or name in expected
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path} is damaged: its header is none of safetensors ({type(error).__name__}: {error})"
        ) from None


def _stored(path: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: shape {shape}, bytes {begin} to {end}")
    if entry["dtype"] not in DTYPES:
        raise UnsupportedError(
            f"{path}: {name} is stored as {entry['dtype']}; weights are read as {', '.join(DTYPES)}. Dequantize the"
            f" model first"
        )
    dtype = DTYPES[entry["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise IntegrityError(
            f"{path} is damaged: {name} of shape {list(shape)} and {entry['dtype']} has {end - begin:,} bytes"
        )
    return StoredTensor(name, path, shape, dtype)
