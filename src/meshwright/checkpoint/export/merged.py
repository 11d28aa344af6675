"""Add a checkpoint's adapters to the weights beside which they were trained, layer by layer; or join what was trained
with what was left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.huggingface import Pretrained, named_tensors
from meshwright.checkpoint.load import open_manifest, read_tensors, verify_files
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.dtypes import torch_dtype
from meshwright.distributed.quantize.nf4 import pack, unpack
from meshwright.introspection.adapted.model import AdaptersPut, adapters_of
from meshwright.introspection.adapted.names import base_name, is_adapter, is_trained_copy
from meshwright.introspection.adapted.request import Adapters

from .files import ToFile, as_transformers_saves, write_files


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
