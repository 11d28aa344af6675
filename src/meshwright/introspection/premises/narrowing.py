"""Detect whether a model computes anywhere in a narrower dtype than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


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
