"""Write a checkpoint's model as Hugging Face safetensors, tensor by tensor; it is never whole in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.load import open_manifest, read_tensors, verify_files
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.tensor_files import DTYPES, INDEX, SINGLE
from meshwright.core.dtypes import torch_dtype
from meshwright.distributed.quantize.nf4 import unpack
from meshwright.introspection.transformers_private import brings_initialiser

FILE_BYTES = 5_000_000_000
"""Size limit of a file, unless one tensor alone is larger."""
CHUNK_BYTES = 2**30
"""Bytes of tensors that are read together."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}

ToFile = Callable[[str, Tensor], dict[str, Tensor]]
"""(name in the model, tensor; also on meta) -> the tensors that the files hold for it, by their names."""
MadeOf = Mapping[str, tuple[str, ...]]
"""Name in the model -> checkpoint names of its tensors, joined along the last dim but one; of none: zeros."""


@dataclass(frozen=True)
class _FileEntry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_tensors(
    checkpoint: Path,
    folder: Path,
    model: nn.Module,
    made_of: MadeOf | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> int:
    """Write the model tensors of ``checkpoint`` into ``folder`` in one process: one file, or several with an index.

    Args:
        model: a model of transformers, on meta, which defines names and form of the tensors in the files.
        made_of: the checkpoint tensors that each model tensor is made of; None: the one of its name.
        dtype: dtype of floating-point parameters; None: as they are. Buffers stay as they are.

    Returns:
        Bytes of all tensors.

    Raises:
        IntegrityError: the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    own = (key.removeprefix("model.") for key in manifest.tensors if key.startswith("model."))
    tensors = _Tensors(checkpoint, manifest, model, made_of or {name: (name,) for name in own}, dtype)
    return write_files(folder, tensors, as_transformers_saves(model), file_bytes)


class ExportedTensors(Protocol):
    """The tensors of a model, in the form of its files."""

    def in_files(self, to_file: ToFile, device: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the contents of the files, always in the same order; on meta nothing is read."""
        ...


def write_files(folder: Path, tensors: ExportedTensors, to_file: ToFile, file_bytes: int = FILE_BYTES) -> int:
    """Write tensors into ``folder``, one after the other: one file, or several with an index.

    Returns:
        Bytes of all tensors.
    """
    planned = [_FileEntry(name, tuple(made.shape), made.dtype) for name, made in tensors.in_files(to_file, "meta")]
    files = _files(planned, file_bytes)
    found = tensors.in_files(to_file, "cpu")
    for name, entries in files.items():
        _write(folder / name, entries, found)
    total = sum(entry.bytes for entry in planned)
    if len(files) > 1:
        weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        )
    return total


def as_transformers_saves(model: nn.Module) -> ToFile:
    """Return a converter of tensors to the form that transformers saves, such as experts one by one.

    Tensors stay as they are where the model has no other form, or one that takes several of them together.
    """
    if not brings_initialiser(model):
        return lambda name, tensor: {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    alone = [revert_weight_conversion(model, {name: tensor}).keys() for name, tensor in state.items()]  # type: ignore[arg-type]
    together = revert_weight_conversion(model, dict(state)).keys()  # type: ignore[arg-type]
    if sum(map(len, alone)) != len(together) or set().union(*alone) != set(together):
        return lambda name, tensor: {name: tensor}
    return lambda name, tensor: revert_weight_conversion(model, {name: tensor})  # type: ignore[arg-type]


def _files(planned: list[_FileEntry], limit: int) -> dict[str, list[_FileEntry]]:
    """Group the tensors into files, in order."""
    groups: list[list[_FileEntry]] = [[]]
    full = 0
    for entry in planned:
        if groups[-1] and full + entry.bytes > limit:
            groups.append([])
            full = 0
        groups[-1].append(entry)
        full += entry.bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


@dataclass(frozen=True)
class _Tensors:
    """The tensors of ``model``, read from a checkpoint."""

    checkpoint: Path
    manifest: Manifest
    model: nn.Module
    made_of: MadeOf
    dtype: str | None

    def in_files(self, to_file: ToFile, device: str) -> Iterator[tuple[str, Tensor]]:
        chunk: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for name in self.made_of:
            chunk[name] = self._empty(name, device)
            parts |= self._parts(name, chunk[name])
            if sum(tensor.nbytes for tensor in chunk.values()) >= CHUNK_BYTES:
                yield from self._read(chunk, parts, to_file)
                chunk, parts = {}, {}
        yield from self._read(chunk, parts, to_file)

    def _read(
        self, chunk: dict[str, Tensor], parts: dict[str, Tensor], to_file: ToFile
    ) -> Iterator[tuple[str, Tensor]]:
        if any(not part.is_meta for part in parts.values()):
            read_tensors(parts, self.checkpoint)
        for name, tensor in chunk.items():
            yield from to_file(name, self._cast(name, self._plain(name, tensor))).items()

    def _empty(self, name: str, device: str) -> Tensor:
        """Allocate a tensor to read into; one that is made of none is zeros already."""
        entries = [self.manifest.tensors[f"model.{own}"] for own in self.made_of[name]]
        if not entries:
            return torch.zeros_like(self.model.state_dict()[name], device=device)
        shape = list(entries[0].shape)
        if len(entries) > 1:
            shape[-2] = sum(entry.shape[-2] for entry in entries)
        return torch.empty(shape, dtype=getattr(torch, entries[0].dtype), device=device)

    def _parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Map keys of the checkpoint to their places in ``tensor``."""
        keys = [f"model.{own}" for own in self.made_of[name]]
        if len(keys) < 2:
            return dict.fromkeys(keys, tensor)
        sizes = [self.manifest.tensors[key].shape[-2] for key in keys]
        return dict(zip(keys, tensor.split(sizes, -2), strict=True))

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the values of a weight that was saved in 4 bits; any other tensor as it is."""
        own = self.made_of[name]
        dtypes = [dtype for one in own if (dtype := self.manifest.in_4_bits.get(one)) is not None]
        return unpack(tensor, torch_dtype(dtypes[0])) if dtypes else tensor

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        is_parameter = name in self._parameters
        return (
            tensor.to(torch_dtype(self.dtype)) if self.dtype and is_parameter and tensor.is_floating_point() else tensor
        )

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}


def _write(path: Path, entries: list[_FileEntry], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write one file: header length, header, bytes of its tensors (https://huggingface.co/docs/safetensors)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _WORDS[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (begin, begin + entry.bytes),
        }
        begin += entry.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in entries:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape), tensor.dtype) == (entry.name, entry.shape, entry.dtype)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
