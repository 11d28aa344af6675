"""Let a copy compute in float64 whose code asks for float32 by name."""

from __future__ import annotations

import threading
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
    for module in model.modules() if is_needed else ():  # stages and copies are made of these modules
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
