"""Map names in Hugging Face files to a model's parameters: prefixes, renamed keys, experts stored one by one.

The conversions of keys and tensors come from transformers' own table for the model, and are done on slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.core.errors import UnsupportedError
from meshwright.introspection.transformers_private import brings_initialiser

from .tensor_files import Cut, TensorFiles


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


def sources(model: nn.Module, known: Iterable[str], files: TensorFiles) -> dict[str, Source]:
    """Map each name in the model to what the files have for it; names that the model lacks stay as they are.

    Args:
        known: every name of a parameter or persistent buffer of ``model``, all names of tied ones included.

    Raises:
        UnsupportedError: transformers makes a tensor of the stored ones other than by stacking and joining.
    """
    if not brings_initialiser(model):
        return {name: Stored(files, name) for name in files.tensors}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = _conversions(model)
    renamings = [row for row in table if isinstance(row, WeightRenaming)]
    converters = [row for row in table if isinstance(row, WeightConverter)]
    names, prefix = dict.fromkeys(known, True), getattr(model, "base_model_prefix", "")
    direct: dict[str, Source] = {}
    collected: dict[str, dict[str, list[Source]]] = {}
    for stored in sorted(files.tensors, key=dot_natural_key):
        name, matched = rename_source_key(stored, renamings, converters, prefix, names)
        if name not in names and stored in names:
            name, matched = stored, None
        if matched is None:
            direct[name] = Stored(files, stored)
        else:
            collected.setdefault(name, {}).setdefault(matched, []).append(Stored(files, stored))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return direct | {name: _converted(by_pattern[next(iter(parts))], parts, name) for name, parts in collected.items()}


def _conversions(model: nn.Module) -> list[Any]:
    """Return transformers' table for a model, which it looks up by class: fully_shard derives classes of its own."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    derived = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, kind in derived:
            module.__class__ = kind.__bases__[-1]
        return get_model_conversion_mapping(model)  # type: ignore[arg-type]
    finally:
        for module, kind in derived:
            module.__class__ = kind


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
