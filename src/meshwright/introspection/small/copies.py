"""Copy models, also those whose forward was replaced by a function that refers to the model."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from meshwright.core.torch_private import forward_hooks

CARRIED = (nn.Module, Tensor)
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
    for module in model.modules():
        carry_functions(module, memo[id(module)], memo)
    return made


def carry_functions(before: nn.Module, after: nn.Module, memo: dict[int, Any]) -> None:
    """Give a module the replaced forward and the hooks of another, for its own modules and tensors.

    Args:
        memo: counterparts of modules and tensors, by id; functions that were copied are added.
    """
    if (forward := vars(before).get("forward")) is not None:
        after.forward = _carried(forward, memo)
    for hooks, others in zip(forward_hooks(before), forward_hooks(after), strict=True):
        others.update({key: _carried(hook, memo) for key, hook in hooks.items()})


def codes_in(block: nn.Module) -> tuple[tuple[str, int, Any], ...]:
    """List replaced forwards (0), hooks in front (1) and hooks behind (2), as (path, number, code)."""
    found: list[tuple[str, int, Any]] = []
    for path, module in block.named_modules():
        called = (vars(module).get("forward"),), *(hooks.values() for hooks in forward_hooks(module))
        for place, functions in enumerate(called):
            for function in functions:
                while isinstance(function, functools.partial):
                    function = function.func
                if function is not None and not getattr(function, "__module__", "").startswith("meshwright."):
                    # meshwright's own hooks stand on copies too
                    found.append((path, place, getattr(function, "__code__", type(function))))
    return tuple(found)


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    has_own = function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
    if id(function) in memo or not has_own:
        return memo.get(id(function), function)
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    memo[id(function)] = made  # it may refer to itself
    made.__defaults__ = _carried(function.__defaults__, memo)
    made.__kwdefaults__ = _carried(function.__kwdefaults__, memo)
    for cell, before in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _carried(before.cell_contents, memo)
        except ValueError:  # an empty cell
            continue
    made.__dict__.update({name: _carried(value, memo) for name, value in vars(function).items()})
    return made


def _carried(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _rebound(value, memo)
    if isinstance(value, MethodType):
        return MethodType(_carried(value.__func__, memo), copy.deepcopy(value.__self__, memo))
    if isinstance(value, functools.partial):
        given = (_carried(each, memo) for each in value.args)
        return functools.partial(_carried(value.func, memo), *given, **_carried(value.keywords, memo))
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is tuple:
        return tuple(_carried(each, memo) for each in value)
    if type(value) is list:
        made = memo[id(value)] = list[Any]()  # it may hold itself, or be another function's too
        made.extend(_carried(each, memo) for each in value)
        return made
    if type(value) is dict:
        table = memo[id(value)] = dict[Any, Any]()
        table.update({key: _carried(each, memo) for key, each in value.items()})
        return table
    return copy.deepcopy(value, memo) if isinstance(value, CARRIED) else value
