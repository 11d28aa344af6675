"""Tell whether a model computes in a narrower dtype than its own, and let a copy compute in float64 all along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .copies import copy_of


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
    for module in model.modules():  # stages and copies are made of these modules
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def _enter(*_: Any) -> None:
    depth = _running.depth = getattr(_running, "depth", 0) + 1
    if depth == 1:
        _running.mode = _Wide()
        _running.mode.__enter__()


def _leave(*_: Any) -> None:
    _running.depth -= 1
    if not _running.depth:
        _running.mode.__exit__(None, None, None)


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
