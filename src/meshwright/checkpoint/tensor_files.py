"""Read slices from a folder's safetensors files in Hugging Face's layout, by the names of parameters there.

The conversions of keys and tensors come from transformers' own table for the model, and are done on slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.files import inside, read_json, refuse_pointer
from meshwright.introspection.module_kinds import brings_initialiser

from .manifest import read_header
from .mirror import weights_store
from .store import RemoteStore

# --- read slices from a folder's safetensors files in Hugging Face's layout

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
Cut = tuple[slice, ...]
GAP = 1 << 16
"""Bytes that are rather read from an address than left out by one more request."""
PART = 1 << 24
"""Bytes of a request at most."""
READERS = 8


@dataclass(frozen=True)
class StoredTensor:
    """The place, shape and dtype of one tensor in a file of the folder."""

    name: str
    file: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """The tensors of a folder by name; opening reads and checks the headers only.

    Args:
        file: the one file to read; "": those of a model.

    Attributes:
        tensors: the stored tensors by name.
        store: where the files are.
        bytes_read: bytes of all slices requested so far, at the dtype of the file.

    Raises:
        ConfigError: there are no weights, or only pickled ones; a name or a link leads out of the folder.
        IntegrityError: a file is truncated or damaged, or is not there although the index names it.
        UnsupportedError: a dtype that torch has no full arithmetic for.
    """

    def __init__(self, folder: str | Path, file: str = ""):
        self.folder = Path(folder).expanduser()
        self.store = weights_store(self.folder)
        files: list[tuple[Path, set[str] | None]]  # each with the names that the index lists for it
        if file:
            files = [(inside(self.folder, file), None)]
        elif (index := inside(self.folder, INDEX)).is_file():
            try:
                weight_map = read_json(index)["weight_map"]
                by_file: dict[str, set[str]] = {}
                for name, own in weight_map.items():
                    by_file.setdefault(own, set()).add(name)
                paths = {own: inside(self.folder, own, INDEX) for own in by_file}
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise IntegrityError(f"{index} is damaged ({type(error).__name__}: {error})") from None
            absent = [own for own in sorted(by_file) if not paths[own].is_file()]
            if absent:
                raise IntegrityError(
                    f"{index} names {', '.join(absent)}, and {self.folder} has no such file: copy it again, whole"
                )
            files = [(paths[own], names) for own, names in sorted(by_file.items())]
        elif holds_weights(self.folder):
            files = [(inside(self.folder, SINGLE), None)]
        else:
            raise ConfigError(f"{self.folder} holds no weights: there is neither {SINGLE} nor {INDEX}")
        self.tensors = {tensor.name: tensor for path, names in files for tensor in self._header(path, names)}
        self.bytes_read = 0
        self._open: dict[str, Any] = {}

    def read(self, name: str, cut: Cut) -> Tensor:
        """Read a part of a tensor to the CPU, in the dtype of the file.

        At an address it is read as runs of bytes; gaps between runs that are shorter than GAP are read too.
        """
        stored = self.tensors[name]
        if not isinstance(self.store, RemoteStore):
            if stored.file not in self._open:
                path = self.folder / stored.file
                self._open[stored.file] = safetensors.safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
            part = self._open[stored.file].get_slice(name)[cut]
            self.bytes_read += part.numel() * part.element_size()
            return part
        shape, item = stored.shape, stored.dtype.itemsize
        spans = [own.indices(size)[:2] for own, size in zip(cut, shape, strict=True)]
        wide = list(spans)
        strides = [math.prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
        dim = len(shape) - 1  # along which the runs are cut
        while dim > 0 and (shape[dim] - wide[dim][1] + wide[dim][0]) * strides[dim] < GAP:
            wide[dim] = 0, shape[dim]
            dim -= 1
        sizes = [high - low for low, high in wide]
        if min(sizes, default=1) <= 0:
            return torch.empty([max(high - low, 0) for low, high in spans], dtype=stored.dtype)
        buffer = bytearray(math.prod(sizes) * item)
        run = math.prod(sizes[max(dim, 0) :]) * item
        corner = stored.begin + (wide[dim][0] * strides[dim] if shape else 0)
        outer = product(*(range(*span) for span in wide[: max(dim, 0)]))
        begins = (corner + sum(place * stride for place, stride in zip(at, strides, strict=False)) for at in outer)
        view = memoryview(buffer)
        with self.store.opened(stored.file) as read_into, ThreadPoolExecutor(READERS) as pool:
            taking = [
                pool.submit(read_into, begin + part, view[number * run + part : number * run + min(part + PART, run)])
                for number, begin in enumerate(begins)
                for part in range(0, run, PART)
            ]
            for one in taking:
                one.result()
        self.bytes_read += len(buffer)
        inner = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(spans, wide, strict=True))
        return torch.frombuffer(buffer, dtype=stored.dtype).reshape(sizes)[inner]

    def _header(self, path: Path, expected: set[str] | None) -> list[StoredTensor]:
        """List the tensors that a file's header has, after comparing it with the file's size and the index."""
        refuse_pointer(path)
        file = str(path.relative_to(self.folder))
        header, first = read_header(self.store, file)
        header.pop("__metadata__", None)
        if expected is not None and (lacking := expected - header.keys()):
            raise IntegrityError(
                f"{path} lacks {sorted(lacking)[0]} ({len(lacking)} in all), which {INDEX} says it holds"
            )
        found = []
        try:
            for name, entry in header.items():
                if expected is not None and name not in expected:
                    continue
                shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
                if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                    raise ValueError(f"{name}: shape {shape}, bytes {begin} to {end}")
                if entry["dtype"] not in DTYPES:
                    raise UnsupportedError(
                        f"{path}: {name} is stored as {entry['dtype']}; weights are read as {', '.join(DTYPES)}."
                        f" Dequantize the model first"
                    )
                dtype = DTYPES[entry["dtype"]]
                if end - begin != math.prod(shape) * dtype.itemsize:
                    raise IntegrityError(
                        f"{path} is damaged: {name} of shape {list(shape)} and {entry['dtype']} has"
                        f" {end - begin:,} bytes"
                    )
                found.append(StoredTensor(name, file, first + begin, shape, dtype))
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{path} is damaged: its header is none of safetensors ({type(error).__name__}: {error})"
            ) from None
        return found


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


# --- map names in Hugging Face files to a model's parameters


class Source(Protocol):
    """A tensor that can be made of stored ones, a part at a time."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def read(self, cut: Cut) -> Tensor: ...


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in the file."""

    files: TensorFiles
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.tensors[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.files.tensors[self.name].dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, cut: Cut) -> Tensor:
        return self.files.read(self.name, cut)


@dataclass(frozen=True)
class _Composed:
    parts: tuple[Source, ...]
    dim: int

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)


class Stacked(_Composed):
    """Several tensors of one shape, along a new dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def read(self, cut: Cut) -> Tensor:
        inner = (*cut[: self.dim], *cut[self.dim + 1 :])
        return torch.stack([part.read(inner) for part in self.parts[cut[self.dim]]], dim=self.dim)


class Concatenated(_Composed):
    """Several tensors end to end along a dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dim], sum(part.shape[self.dim] for part in self.parts), *inner[self.dim + 1 :])

    def read(self, cut: Cut) -> Tensor:
        wanted, begin, found = cut[self.dim], 0, []
        for part in self.parts:
            size = part.shape[self.dim]
            low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, size)
            if low < high:
                found.append(part.read((*cut[: self.dim], slice(low, high), *cut[self.dim + 1 :])))
            begin += size
        return torch.cat(found, dim=self.dim)


def sources(model: nn.Module, known: Mapping[str, tuple[int, ...]], files: TensorFiles) -> dict[str, Source]:
    """Map each name in the model to what the files have for it; names that the model lacks stay as they are.

    Args:
        known: the whole shape of every parameter and persistent buffer of ``model``, under all names of tied ones.

    Raises:
        UnsupportedError: transformers makes a tensor of the stored ones other than by stacking and joining.
    """
    if not brings_initialiser(model):
        return {name: Stored(files, name) for name in files.tensors}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    # transformers looks its table up by class, and fully_shard derives classes of its own
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, kind in sharded:
            module.__class__ = kind.__bases__[-1]
        table: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    finally:
        for module, kind in sharded:
            module.__class__ = kind
    renamings = [row for row in table if isinstance(row, WeightRenaming)]
    converters = [row for row in table if isinstance(row, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names, prefix = dict.fromkeys(known, True), getattr(model, "base_model_prefix", "")
    direct: dict[str, Source] = {}
    collected: dict[str, dict[str, list[Source]]] = {}
    for stored in sorted(files.tensors, key=dot_natural_key):
        name, matched = rename_source_key(stored, renamings, converters, prefix, names)
        if name not in names and stored in names:
            name, matched = stored, None
        shape = files.tensors[stored].shape
        turns = matched is not None and [getattr(each, "check_dims", False) for each in by_pattern[matched].operations]
        if matched is None or (turns and all(turns) and shape == known.get(name, shape)):  # it turns other shapes only
            direct[name] = Stored(files, stored)
        else:
            collected.setdefault(name, {}).setdefault(matched, []).append(Stored(files, stored))
    return direct | {name: _converted(by_pattern[next(iter(parts))], parts, name) for name, parts in collected.items()}


def _converted(converter: Any, parts: dict[str, list[Source]], name: str) -> Source:
    """Apply a converter of transformers to the stored tensors that its patterns matched."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    values = {pattern: list(parts[pattern]) for pattern in converter.source_patterns if pattern in parts}
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            values = {pattern: [Stacked(tuple(found), operation.dim)] for pattern, found in values.items()}
        elif type(operation) is Concatenate:
            values = {"": [Concatenated(tuple(part for found in values.values() for part in found), operation.dim)]}
        else:
            values = {}
    made = [part for found in values.values() for part in found]
    if len(made) != 1 or len(converter.target_patterns) != 1:
        stored = [part.names[0] for found in parts.values() for part in found]
        what = " and ".join(type(operation).__name__ for operation in converter.operations)
        raise UnsupportedError(
            f"{name} is made of {', '.join(stored[:3])}{' …' if len(stored) > 3 else ''} by {what}, which cannot be"
            f" done on slices. Save the model in the form that transformers holds it in: model.save_pretrained(folder,"
            f" save_original_format=False)"
        )
    return made[0]
