"""Put a small model that a config builds into a large one's wrappers, around the model and around single layers.

A wrapper is a module around one of the same class as the small model has in its place. Wrappers are copied without
weights, in sizes that follow from the layer inside; their own settings (a rank, a scale, a rate of dropout) stay.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meshwright.introspection.module_kinds import config_at

from .copies import carry_functions


class UnlikeError(Exception):
    """The small model differs in construction from the large one."""


def grafted(large: nn.Module, small: nn.Module) -> nn.Module:
    """Put ``small`` into copies of the wrappers of ``large``, if it has any; ``large`` is unchanged.

    Raises:
        UnlikeError: the sizes of a wrapper do not follow from the module inside.
    """
    memo = _Counterparts(large)
    made = _graft(large, small, memo)
    counterparts = [(module, found) for module in large.modules() if (found := memo.get(id(module))) is not None]
    for module, found in counterparts:
        for name, parameter in found.named_parameters(recurse=False):
            memo[id(module._parameters.get(name))] = parameter
    memo.is_complete = True
    for module, found in counterparts:
        carry_functions(module, found, memo)
    return made


class _Counterparts(dict[int, Any]):
    """What stands in the small model for a module or tensor of the large one, by its id.

    Raises:
        UnlikeError: a replaced forward or a hook asks for a module or a parameter of the large model that has none.
    """

    def __init__(self, large: nn.Module) -> None:
        super().__init__()
        self.names = {id(each): path for path, each in (*large.named_modules(), *large.named_parameters())}
        self.is_complete = False

    def get(self, key: int, default: Any = None) -> Any:
        if self.is_complete and key not in self and key in self.names:
            raise UnlikeError(f"a replaced forward or a hook refers to {self.names[key]}, which a small model lacks")
        return super().get(key, default)


def _graft(large: nn.Module, small: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if type(large) is type(small):
        for name, child in small.named_children():
            if (counterpart := getattr(large, name, None)) is None:
                raise UnlikeError(f"{type(large).__name__} has no {name}")
            small.add_module(name, _graft(counterpart, child, memo))
        memo[id(large)] = small
        if hasattr(large, "config"):
            memo[id(large.config)] = getattr(small, "config", None)
        return small
    if config_at(large) is not None and type(small) is nn.Linear:
        return small  # rounding does not change how it can be cut
    inner = next((module for module in large.modules() if type(module) is type(small)), None)
    if inner is None:
        raise UnlikeError(f"{type(large).__name__} has no {type(small).__name__} inside")
    _graft(inner, small, memo)
    sizes = _sizes(inner, small)
    device = next(small.parameters(), torch.empty(0)).device
    for tensor in _own_tensors(large, inner):
        memo[id(tensor)] = _resized(tensor, sizes, device)
    made = copy.deepcopy(large, memo)
    for module in made.modules():
        if not any(module is part for part in small.modules()):
            for name, value in list(vars(module).items()):
                if type(value) is int and value in sizes:
                    setattr(module, name, sizes[value])
    return made


def _sizes(inner: nn.Module, small: nn.Module) -> dict[int, int]:
    """Map the sizes of a layer's weight in the large model to those in the small one; empty for whole models."""
    large_weight, small_weight = inner._parameters.get("weight"), small._parameters.get("weight")
    if large_weight is None or small_weight is None:
        return {}
    found: dict[int, int] = {}
    for before, after in zip(large_weight.shape, small_weight.shape, strict=True):
        if found.setdefault(before, after) != after:
            raise UnlikeError("two sizes of a layer are equal in the large model, and not in the small one")
    return found


def _own_tensors(large: nn.Module, inner: nn.Module) -> list[torch.Tensor]:
    inside = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    return [tensor for tensor in (*large.parameters(), *large.buffers()) if id(tensor) not in inside]


def _resized(tensor: torch.Tensor, sizes: dict[int, int], device: torch.device) -> torch.Tensor:
    if sizes and tensor.dim() > 1 and all(size in sizes for size in tensor.shape):
        raise UnlikeError(
            "an adapter has as many features as its host: which of them follow from the model's width cannot be told"
        )
    shape = [sizes.get(size, size) for size in tensor.shape]
    made = torch.zeros(shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
