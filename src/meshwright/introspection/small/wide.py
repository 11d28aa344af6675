"""Let a copy compute in float64 whose code asks for float32 by name."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .copies import copy_of


class _Wide(TorchFunctionMode):
    """Takes float64 for float32, in conversions, as a dtype that is named, and for numbers that are made tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        named = {key: _wide(value) for key, value in (kwargs or {}).items()}
        if func in (torch.full, torch.tensor) and isinstance(args[-1], float):
            named.setdefault("dtype", torch.float64)
        return func(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


_running = threading.local()


def compute_wide(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Let a model in float64 take float64 wherever its code says float32, if a forward fails without."""
    try:
        with torch.no_grad():
            copy_of(model)(**inputs)  # a forward may write to what the model holds
    except RuntimeError as error:
        if not any(word in str(error) for word in ("dtype", "scalar type", "double", "without overflow")):
            return
        for module in model.modules():  # hooks, and no other forwards: stages and copies are made of these modules
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
    except Exception:  # noqa: BLE001  (whoever measures the model meets it)
        return


def _enter(*_: Any) -> None:
    depth = _running.depth = getattr(_running, "depth", 0) + 1
    if depth == 1:
        _running.mode = _Wide()
        _running.mode.__enter__()


def _leave(*_: Any) -> None:
    _running.depth -= 1
    if not _running.depth:
        _running.mode.__exit__(None, None, None)
