"""Teach torch's names for pinned memory, storages and generators the device; C++ has no hook for Python here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshwright.core import devices

from . import memory
from .host import pinned
from .kinds import is_pinned
from .names import DEVICE_TYPE
from .torch_private import know_factories

FACTORIES = ("empty", "empty_like", "zeros", "zeros_like", "empty_strided", "full", "ones", "tensor", "rand", "randn")

_DATA: Any = torch.Tensor.data


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def factory(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return pinned(made) if pin_memory and made.device.type == "cpu" else made

    return factory


def _to_pinned(self: Tensor, device: Any = None) -> Tensor:
    return self if is_pinned(self) else pinned(self.detach().clone())


def _storage(method: str) -> Callable[..., Any]:
    plain = getattr(torch.UntypedStorage, method)

    @wraps(plain)
    def size(self: torch.UntypedStorage) -> int:
        block = self.__dict__.get("allocation")
        return 0 if block is not None and block.is_freed else plain(self)

    return size


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Set a tensor's data; C++ allows that between the CPU and CUDA, and refuses an extension device."""
    if tensor.device.type == value.device.type:
        _DATA.__set__(tensor, value)
        return
    made = value.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)


class PretendGenerator(torch.Generator):
    """A generator for the device is one of the host: the host's kernels draw the numbers."""

    def __new__(cls, device: Any = "cpu") -> PretendGenerator:
        of = torch.device(device)
        return super().__new__(cls, torch.device("cpu") if of.type == DEVICE_TYPE else of)  # pyright: ignore[reportCallIssue]

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()  # torch reads the device in __new__


def install() -> None:
    """Patch torch, for the rest of this process."""
    know_factories()
    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.Tensor.pin_memory = _to_pinned
    devices.pin_shared = lambda shared, device: pinned(shared)
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)
    torch.Tensor.data = property(lambda self: _DATA.__get__(self), _set_data)  # pyright: ignore[reportAttributeAccessIssue]
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        return None if memory.resized(self, size) else resize(self, size)

    torch.UntypedStorage.resize_ = resize_
    for method in ("size", "nbytes"):
        setattr(torch.UntypedStorage, method, _storage(method))
    torch.Generator = PretendGenerator
