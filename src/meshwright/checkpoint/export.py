"""Write a checkpoint's model in the forms that transformers and peft read.

with what was left out.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.quantize.nf4 import pack, unpack
from meshwright.introspection.adapted.folder import ROUNDED_IN, WEIGHTS
from meshwright.introspection.adapted.model import (
    ADAPTER,
    AdaptersPut,
    adapters_of,
    base_name,
    is_adapter,
    is_trained_copy,
    peft_name,
    rewritten,
)
from meshwright.introspection.adapted.request import Adapters
from meshwright.introspection.module_kinds import brings_initialiser

from .huggingface import Pretrained, named_tensors
from .load import open_manifest, read_tensors, verify_files
from .manifest import Manifest
from .tensor_files import DTYPES, INDEX, SINGLE

# --- write a checkpoint's model as Hugging Face safetensors, tensor by tensor

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


# --- add a checkpoint's adapters to the weights beside which they were trained, layer by layer


def export_merged(
    checkpoint: Path,
    folder: Path,
    adapted: nn.Module,
    plain: nn.Module,
    base: Pretrained | None,
    dtype: str | None = None,
) -> int:
    """Write a model with its adapters added into ``folder``, as transformers saves it without adapters.

    peft computes each merged weight, in the model's dtype; one layer at a time is in memory.

    Args:
        adapted: the model with adapters, on meta; of a model without any, ``plain``.
        plain: the same model without, on meta; it defines names and form of the tensors in the files.
        base: the weights beside which the adapters were trained; None: the checkpoint left nothing out.
        dtype: dtype of floating-point parameters; None: the model's.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError, IntegrityError: the base is that of another model, or the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    tensors = _Merged(checkpoint, manifest, adapted, plain, base, dtype)
    return write_files(folder, tensors, as_transformers_saves(plain))


@dataclass(frozen=True)
class _Merged:
    checkpoint: Path
    manifest: Manifest
    adapted: nn.Module
    plain: nn.Module
    base: Pretrained | None
    dtype: str | None
    _last: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def in_files(self, to_file: ToFile, device: str) -> Iterator[tuple[str, Tensor]]:
        for name, like in named_tensors(self.plain).items():
            tensor = like if device == "meta" else self._value(name, like)
            cast = self.dtype is not None and name in self._parameters and tensor.is_floating_point()
            yield from to_file(name, tensor.to(torch_dtype(self.dtype)) if cast and self.dtype else tensor).items()

    def _value(self, name: str, like: Tensor) -> Tensor:
        if name in self._copies:
            return self._stored(self._copies[name], like)
        path, _, own = name.rpartition(".")
        if name in self._put.parameters or (own == "weight" and path in self._put.targets):
            return self._merged(path)[own]
        return self._frozen(name, like)

    def _frozen(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor of the model without adapters: from the checkpoint, or from the base what that left out."""
        own = self._own_names.get(name, name)
        if f"model.{own}" in self.manifest.tensors:
            return self._stored(own, like)
        value, rounded_in = self._read(name), self.manifest.in_4_bits.get(own)
        if rounded_in is not None:  # adapters were trained beside the rounded weight
            value = unpack(pack(value.to(torch_dtype(rounded_in))), like.dtype)
        return value.to(like.dtype)

    def _merged(self, path: str) -> dict[str, Tensor]:
        """Return the parameters of an adapted layer, or of a stack, with its adapters added; the last one is kept."""
        if path in self._last:
            return self._last[path]
        self._last.clear()
        layer: Any = copy.deepcopy(self.adapted.get_submodule(path)).to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in layer.state_dict(keep_vars=True).items():
                full = f"{path}.{name}"
                tensor.copy_(self._stored(full, tensor) if is_adapter(full) else self._frozen(base_name(full), tensor))
            around = layer
            while hasattr(around, "base_layer"):
                around.merge(safe_merge=True)
                around = around.base_layer
        return self._last.setdefault(path, {name: p.detach() for name, p in around.named_parameters(recurse=False)})

    def _stored(self, name: str, like: Tensor) -> Tensor:
        entry = self.manifest.tensors[f"model.{name}"]
        read = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        read_tensors({f"model.{name}": read}, self.checkpoint)
        return unpack(read, like.dtype) if name in self.manifest.in_4_bits else read.to(like.dtype)

    @cached_property
    def _read(self) -> Any:
        assert self.base is not None
        return self.base.reader(self.plain)

    @cached_property
    def _put(self) -> AdaptersPut:
        put = adapters_of(self.adapted)
        return put or AdaptersPut(Adapters(), ())

    @cached_property
    def _own_names(self) -> dict[str, str]:
        """Names in the plain model, and the names of the same tensors beside adapters."""
        held = [name for name in named_tensors(self.adapted) if not (is_adapter(name) or is_trained_copy(name))]
        return {base_name(name): name for name in held}

    @cached_property
    def _copies(self) -> dict[str, str]:
        """Names in the plain model of what was trained whole, and the names of the trained copies."""
        return {base_name(name): name for name, _ in self.adapted.named_parameters() if is_trained_copy(name)}

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self.plain.named_parameters(remove_duplicate=False)}


# --- write a checkpoint's adapters as the folder that peft, transformers and vLLM read


def export_adapter(checkpoint: Path, folder: Path, adapted: nn.Module, base: str, dtype: str | None = None) -> int:
    """Write adapters, and modules that were trained whole, with peft's adapter_config.json.

    Args:
        adapted: the model with adapters, on meta.
        base: path or name of the base, which readers of the folder load first.
        dtype: dtype of the tensors; None: as in the checkpoint.

    Returns:
        Bytes of all tensors.

    Raises:
        IntegrityError: the checkpoint is damaged.
        ConfigError: adapters were frozen, and the checkpoint leaves frozen parameters out.
        UnsupportedError: peft's config has no words for these adapters.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    names = [name for name, _ in adapted.named_parameters() if is_adapter(name) or is_trained_copy(name)]
    if left_out := [name for name in names if name in manifest.left_out]:
        raise ConfigError(
            f"{checkpoint} was saved with only_trained=True and lacks {left_out[0]}, which was frozen: save it whole"
        )
    entries = {name: manifest.tensors[f"model.{name}"] for name in names}
    read = {f"model.{name}": torch.empty(row.shape, dtype=getattr(torch, row.dtype)) for name, row in entries.items()}
    read_tensors(read, checkpoint)
    tensors = {peft_name(name): read[f"model.{name}"] for name in names}
    if dtype is not None:
        tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
    rounded = {ROUNDED_IN: next(iter(manifest.in_4_bits.values()))} if manifest.in_4_bits else {}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | rounded)
    config = _as_peft_reads(adapted)
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def code_to_read(checkpoint: Path, folder: Path, plain: nn.Module, kind: str, base: str) -> str:
    """Return Python code that puts exported adapters beside the weights beside which they were trained.

    A base that was held in 4 bits is rounded alike by bitsandbytes: codes, blocks of 64 and scales are equal.

    Args:
        folder: the exported adapters.
        plain: the model without adapters.
        kind: class of transformers that reads it.
    """
    rounded = {base_name(name): dtype for name, dtype in open_manifest(checkpoint).in_4_bits.items()}
    lines = ["import peft", "import transformers"]
    options = ""
    if rounded:
        dtype = f"torch.{next(iter(rounded.values()))}"
        whole = [p for p, m in plain.named_modules() if isinstance(m, nn.Linear) and f"{p}.weight" not in rounded]
        lines += [
            "import torch",
            "bits = transformers.BitsAndBytesConfig(",
            f'    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype},',
            f"    llm_int8_skip_modules={whole!r},",
            ")",
        ]
        options = f", dtype={dtype}, quantization_config=bits"
    lines += [
        f"model = transformers.{kind}.from_pretrained({base!r}{options})",
        f"model = peft.PeftModel.from_pretrained(model, {str(folder)!r})",
    ]
    return "\n".join(lines)


def _as_peft_reads(adapted: nn.Module) -> Any:
    """Return peft's config of a model's adapters, by which peft puts them where they are here.

    peft takes some layers' names for those of experts that are stacked today. It takes such a layer by its weight's
    name, where it computes the same from the same tensors.
    """
    held: Any = adapted.peft_config
    config = copy.copy(held[ADAPTER])
    names, put = set(config.target_modules or ()), adapters_of(adapted)
    taken = rewritten(config, adapted, names)
    if not taken or put is None:
        return config
    if put.adapters.kind == "dora":
        raise UnsupportedError(
            f"peft takes {', '.join(taken)} of {type(adapted).__name__} for its experts' stack, beside which it has no"
            f" DoRA: it cannot read these adapters. Use --to merged, which writes the model with its adapters added."
        )
    beside = [path for path in put.targets if any(path == name or path.endswith(f".{name}") for name in taken)]
    config.target_modules = names - set(taken)
    config.target_parameters = [*(config.target_parameters or ()), *(f"{path}.weight" for path in beside)]
    config.lora_dropout = 0.0  # peft has none beside a weight
    return config
