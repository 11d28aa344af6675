"""Copy models, also those whose forward was replaced, and let a copy compute in float64 all along."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.torch_private import forward_hooks
from meshwright.introspection.calls import SeenEnough, watching
from meshwright.introspection.module_kinds import config_at
from meshwright.introspection.signature import Signature

# --- copy models, also those whose forward was replaced by a function that refers to the model

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
    ``instead``: objects to take in place of copies, by the id of the object that they replace.
    """
    # most dicts of hooks are empty, and copying those takes three quarters of the time of a small model's copy
    kinds, modules = (dict, OrderedDict), model.modules()
    memo: dict[int, Any] = {id(d): type(d)() for m in modules for d in vars(m).values() if type(d) in kinds and not d}
    memo |= instead or {}
    made = copy.deepcopy(model, memo)
    for module in model.modules():
        carry_functions(module, memo[id(module)], memo)
    return made


def carry_functions(before: nn.Module, after: nn.Module, memo: dict[int, Any]) -> None:
    """Give a module another's replaced forward and hooks, for its own modules and tensors; ``memo``: by id, theirs."""
    if (forward := vars(before).get("forward")) is not None:
        after.forward = _carried(forward, memo)
    for place, hooks in enumerate(forward_hooks(before)):
        if hooks:
            forward_hooks(after)[place].update({key: _carried(hook, memo) for key, hook in hooks.items()})


def codes_in(block: nn.Module) -> tuple[tuple[str, int, Any], ...]:
    """List replaced forwards (0), hooks in front (1) and hooks behind (2), as (path, number, code)."""
    found: list[tuple[str, int, Any]] = []
    for path, module in block.named_modules():
        before, behind = forward_hooks(module)
        for place, functions in enumerate(((vars(module).get("forward"),), before.values(), behind.values())):
            for function in functions:
                while isinstance(function, functools.partial):
                    function = function.func
                if function is not None and not getattr(function, "__module__", "").startswith("meshwright."):
                    # meshwright's own hooks stand on copies too
                    found.append((path, place, getattr(function, "__code__", type(function))))
    return tuple(found)


def _carried(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        has_own = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)
        if id(value) in memo or not has_own:
            return memo.get(id(value), value)
        cells = tuple(CellType() for _ in value.__closure__ or ())
        function = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        memo[id(value)] = function  # it may refer to itself
        function.__defaults__ = _carried(value.__defaults__, memo)
        function.__kwdefaults__ = _carried(value.__kwdefaults__, memo)
        for cell, before in zip(cells, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                cell.cell_contents = _carried(before.cell_contents, memo)
        function.__dict__.update({name: _carried(each, memo) for name, each in vars(value).items()})
        return function
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


# --- tell whether a model computes in a narrower dtype than its own, and let a copy compute in float64 all along


class _Wide(TorchFunctionMode):
    """Takes float64 for float32, in conversions, as a dtype that is named, and for numbers that are made tensors.

    torch's attention on CPUs (2.13) reads a mask in float32 beside queries in float64 as if it were float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        named = {key: _wide(value) for key, value in (kwargs or {}).items()}
        if func in (torch.full, torch.tensor) and isinstance(args[-1], float):
            named.setdefault("dtype", torch.float64)
        if func is F.scaled_dot_product_attention:
            args = tuple(_widened(value) for value in args)
            named = {key: _widened(value) for key, value in named.items()}
        return func(*map(_wide, args), **named)


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value


class _Masks(TorchFunctionMode):
    """Notes whether attention is given a mask in float32 beside queries in float64."""

    differ = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            dtypes = {value.dtype for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)}
            self.differ |= {torch.float32, torch.float64} <= dtypes
        return func(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


_running = threading.local()


def compute_wide(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Let a model in float64 take float64 wherever its code says float32, if a forward fails or is wrong without."""
    try:
        with torch.no_grad(), _Masks() as masks:
            copy_of(model)(**inputs)  # a forward may write to what the model holds
        is_needed = masks.differ
    except RuntimeError as error:
        is_needed = any(word in str(error) for word in ("dtype", "scalar type", "double", "without overflow"))
    except Exception:  # noqa: BLE001  (whoever measures the model meets it)
        return
    if is_needed:
        _widen(model)


def widened(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64 that takes float64 wherever its code says float32."""
    made = copy_of(model)
    _widen(made)
    return made


def _widen(model: nn.Module) -> None:
    def enter(*_: Any) -> None:
        depth = _running.depth = getattr(_running, "depth", 0) + 1
        if depth == 1:
            _running.mode = _Wide()
            _running.mode.__enter__()

    def leave(*_: Any) -> None:
        _running.depth -= 1
        if not _running.depth:
            _running.mode.__exit__(None, None, None)

    for module in model.modules():  # stages and copies are made of these modules
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def narrows(forward: Callable[[], Any]) -> bool:
    """Return whether a forward narrows results of its parameters; reordered sums then agree in that dtype only."""
    with _Narrowing() as watch:
        forward()
    return watch.found


class _Narrowing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and args and isinstance(args[0], Tensor):
            given = args[0].dtype
            self.found |= (
                given.is_floating_point and result.is_floating_point() and result.dtype.itemsize < given.itemsize
            )
        return result


# --- find the table that a model looks its token ids up in, by a forward without values that ends there


def rows_of_token_table(model: nn.Module) -> int | None:
    """Return the number of rows of the embedding that takes a model's token ids, None where none is seen to.

    Positions, types and images have tables too, so what a table is given decides. No weight is copied or computed with.
    """
    name = Signature.of(model).takes["tokens"]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if name is None or not tables:
        return None
    found: list[int] = []

    def look(path: str, table: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is not None and given.device == tokens.device and torch.equal(given, tokens):
            found.append(int(table.num_embeddings))  # type: ignore[arg-type]
            raise SeenEnough

    # whatever a model's code or torch raises of tensors without values: then nothing is known
    with contextlib.suppress(Exception), torch.no_grad():
        tokens = torch.tensor([[1, 0, 1], [0, 1, 1]])  # on the CPU, with values: neither positions nor types
        copy = meta_copy_of(model)
        with watching([pair for pair in copy.named_modules() if isinstance(pair[1], nn.Embedding)], look):
            copy(**{name: tokens})
    return found[0] if found else None


# --- put a small model that a config builds into a large one's wrappers, around the model and around single layers


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
    """What stands in the small model for a module or tensor of the large one, by its id; UnlikeError of others."""

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
    # of a layer, the sizes of its weight in the large model -> those in the small one; none of whole models
    weights = inner._parameters.get("weight"), small._parameters.get("weight")
    sizes: dict[int, int] = {}
    for before, after in zip(weights[0].shape, weights[1].shape, strict=True) if None not in weights else ():  # type: ignore[union-attr]
        if sizes.setdefault(before, after) != after:
            raise UnlikeError("two sizes of a layer are equal in the large model, and not in the small one")
    device = next(small.parameters(), torch.empty(0)).device
    inside = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    for tensor in (*large.parameters(), *large.buffers()):
        if id(tensor) in inside:
            continue
        if sizes and tensor.dim() > 1 and all(size in sizes for size in tensor.shape):
            raise UnlikeError(
                "an adapter has as many features as its host: which of them follow from the model's width cannot be"
                " told"
            )
        shape = [sizes.get(size, size) for size in tensor.shape]
        blank = torch.zeros(shape, dtype=tensor.dtype, device=device)
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    made = copy.deepcopy(large, memo)
    for module in made.modules():
        if not any(module is part for part in small.modules()):
            for name, value in list(vars(module).items()):
                if type(value) is int and value in sizes:
                    setattr(module, name, sizes[value])
    return made
