"""Writing a checkpoint's model as the safetensors files of Hugging Face, tensor by tensor; the model is never whole in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.core.dtypes import torch_dtype
from meshwright.introspection.huggingface import brings_initialiser

from .load import open_manifest, read_tensors, verify_files
from .manifest import Manifest
from .tensor_files import DTYPES, INDEX, SINGLE

FILE_BYTES = 5_000_000_000
"""The largest file, unless one tensor alone is larger."""
CHUNK_BYTES = 2**30
"""Tensors that are read together."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}

ToFile = Callable[[str, Tensor], dict[str, Tensor]]
"""(name in the model, tensor; also on meta) -> what the files hold for it, by their names."""


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_tensors(checkpoint: Path, folder: Path, to_file: ToFile, dtype: str | None = None, file_bytes: int = FILE_BYTES) -> int:
    """Write the model tensors of ``checkpoint`` into ``folder``: one file, or several with an index. In one process.

    Args:
        to_file: names and form of the tensors in the files.
        dtype: of floating-point tensors; None: as they are.

    Returns:
        Bytes of all tensors.

    Raises:
        IntegrityError: the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    names = [key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")]
    planned = [
        _Entry(name, tuple(made.shape), made.dtype)
        for own in names
        for name, made in to_file(own, _cast(_empty(manifest, own, "meta"), dtype)).items()
    ]
    files = _files(planned, file_bytes)
    tensors = _tensors(checkpoint, manifest, names, to_file, dtype)
    for name, entries in files.items():
        _write(folder / name, entries, tensors)
    total = sum(entry.bytes for entry in planned)
    if len(files) > 1:
        weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return total


def as_transformers_saves(model: nn.Module) -> ToFile:
    """The form in which transformers itself would save a model's tensors, such as experts one by one; as the model has them where it has
    no other form, or one that takes several of the model's tensors together."""
    if not brings_initialiser(model):
        return lambda name, tensor: {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    alone = [revert_weight_conversion(model, {name: tensor}).keys() for name, tensor in state.items()]  # type: ignore[arg-type]
    together = revert_weight_conversion(model, dict(state)).keys()  # type: ignore[arg-type]
    if sum(map(len, alone)) != len(together) or set().union(*alone) != set(together):
        return lambda name, tensor: {name: tensor}
    return lambda name, tensor: revert_weight_conversion(model, {name: tensor})  # type: ignore[arg-type]


def _files(planned: list[_Entry], limit: int) -> dict[str, list[_Entry]]:
    """The tensors of each file, in order."""
    groups: list[list[_Entry]] = [[]]
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


def _tensors(checkpoint: Path, manifest: Manifest, names: list[str], to_file: ToFile, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """What the files hold, in the order of the plan."""
    chunk: dict[str, Tensor] = {}
    held = 0
    for own in names:
        chunk[own] = _empty(manifest, own, "cpu")
        held += chunk[own].nbytes
        if held < CHUNK_BYTES and own != names[-1]:
            continue
        read_tensors({f"model.{name}": tensor for name, tensor in chunk.items()}, checkpoint)
        for name, tensor in chunk.items():
            yield from to_file(name, _cast(tensor, dtype)).items()
        chunk, held = {}, 0


def _empty(manifest: Manifest, name: str, device: str) -> Tensor:
    entry = manifest.tensors[f"model.{name}"]
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor.to(torch_dtype(dtype)) if dtype and tensor.is_floating_point() else tensor


def _write(path: Path, entries: list[_Entry], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One file: the length of the header, the header, the bytes of its tensors (https://huggingface.co/docs/safetensors)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        header[entry.name] = {"dtype": _WORDS[entry.dtype], "shape": entry.shape, "data_offsets": (begin, begin + entry.bytes)}
        begin += entry.bytes
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    with open(path, "wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for entry in entries:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape), tensor.dtype) == (entry.name, entry.shape, entry.dtype)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
