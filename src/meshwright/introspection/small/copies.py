"""Copy models, also those whose forward was replaced by a function that refers to the model."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from meshwright.core.torch_private import forward_hooks

CARRIED = (nn.Module, Tensor, MethodType, functools.partial, list, tuple, dict)
"""Types of objects referenced by a function that are copied with the model."""


def meta_copy_of(model: nn.Module) -> nn.Module:
    """Copy a model deeply with all its tensors on meta, in the memory of none."""
    return copy_of(
        model,
        {id(t): t.to("meta") for t in model.buffers()}
        | {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()},
    )


def copy_of(model: nn.Module, instead: dict[int, Any] | None = None) -> nn.Module:
    """Copy a model deeply, together with the functions that replace modules' forwards, and hooks.

    ``copy.deepcopy`` leaves functions as they are: a copied model whose forward is a closure would run the original.

    Args:
        instead: objects to take in place of copies, by the id of the object that they replace.
    """
    memo: dict[int, Any] = dict(instead or {})
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        if isinstance(forward := vars(module).get("forward"), FunctionType):
            module.forward = _rebound(forward, memo)
        for hooks in forward_hooks(module):
            hooks.update({key: _rebound(hook, memo) for key, hook in hooks.items() if isinstance(hook, FunctionType)})
    return made


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if id(function) in memo or not function.__closure__:
        return memo.get(id(function), function)
    cells = tuple(CellType() for _ in function.__closure__)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made  # it may refer to itself
    for cell, before in zip(cells, function.__closure__, strict=True):
        try:
            cell.cell_contents = _carried(before.cell_contents, memo)
        except ValueError:  # an empty cell
            continue
    made.__dict__.update({name: _carried(value, memo) for name, value in vars(function).items()})
    return made


def _carried(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _rebound(value, memo)
    return copy.deepcopy(value, memo) if isinstance(value, CARRIED) else value
