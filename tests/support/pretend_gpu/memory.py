"""Give the pretend device memory: real bytes of the host, in tensors that say they lie on the device.

A tensor changes its device in place by DLPack, whose header names the device: storage, strides and bytes stay. So
operators can be computed by the CPU's kernels on the same memory, and views, in-place writes and ``set_`` need no
bookkeeping of their own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .names import DEVICE_TYPE
from .torch_private import dlpack_of, from_dlpack

EXTENSION, HOST = 12, 1
"""DLPack's codes of an extension device (torch: PrivateUse1) and of host memory."""
POISON = 0xFF
"""Each byte of memory that nobody wrote, or that was freed: NaN in every floating dtype, -1 in signed integers."""


class _DeviceField(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Header(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _DeviceField))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _relabelled(tensor: Tensor, kind: int) -> Tensor:
    capsule = dlpack_of(tensor)
    header = _Header.from_address(_pointer_of(capsule, b"dltensor"))
    header.device.kind, header.device.index = kind, 0
    return from_dlpack(capsule)


def is_pretend(value: Any) -> bool:
    """Return whether a value is a tensor on the pretend device."""
    return isinstance(value, Tensor) and value.device.type == DEVICE_TYPE


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the same bytes as a tensor of the pretend device."""
    return _relabelled(tensor.detach() if tensor.requires_grad else tensor, HOST)


@dataclass(eq=False)
class Allocation:
    """One allocation of the pretend device.

    Attributes:
        number: serial number of the allocation.
        nbytes: size, in bytes.
        address: address of the first byte.
        home: stream that the memory belongs to: the current one when it was allocated.
        is_freed: whether the storage was resized to nothing, as FSDP2 does with gathered parameters.
        others: streams that ``record_stream`` names: the memory outlives their work.
    """

    number: int
    nbytes: int
    address: int
    home: int
    is_freed: bool = False
    others: set[int] = field(default_factory=set)


def _default_stream() -> int:
    return 0


def _nothing(allocation: Allocation) -> None:
    return None


@dataclass
class Usage:
    """Bytes of the pretend device that are allocated now, and the most since the last reset.

    Attributes:
        current_stream: returns the number of the stream that an allocation belongs to.
        allocated, freed: called with memory that the device gives, and gets back.
    """

    now: int = 0
    peak: int = 0
    current_stream: Callable[[], int] = _default_stream
    allocated: Callable[[Allocation], None] = _nothing
    freed: Callable[[Allocation], None] = _nothing

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


USAGE = Usage()
_numbers = count()


def on_device(tensor: Tensor) -> Tensor:
    """Return a tensor of the pretend device over the bytes of a CPU tensor that nobody else uses: an allocation."""
    made = _relabelled(tensor, EXTENSION)
    storage = made.untyped_storage()
    nbytes = tensor.untyped_storage().nbytes()
    allocation = Allocation(next(_numbers), nbytes, tensor.untyped_storage().data_ptr(), USAGE.current_stream())
    storage.__dict__["allocation"] = allocation
    USAGE.take(nbytes)
    USAGE.allocated(allocation)
    weakref.finalize(storage, _gone, allocation).atexit = False
    return made


def _gone(allocation: Allocation) -> None:
    if not allocation.is_freed:
        USAGE.take(-allocation.nbytes)
        USAGE.freed(allocation)


def allocation_of(tensor: Tensor) -> Allocation:
    """Return the allocation that a tensor of the pretend device lies in."""
    storage = tensor.untyped_storage()
    found = storage.__dict__.get("allocation")
    if found is None:  # made by code that does not allocate: an alias of memory that is not the device's
        found = storage.__dict__["allocation"] = Allocation(
            next(_numbers), storage.nbytes(), tensor.data_ptr(), USAGE.current_stream()
        )
    return found


def poison(tensor: Tensor) -> Tensor:
    """Fill a CPU tensor's memory as memory that nobody wrote is filled, and return it."""
    if tensor.numel():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.fill_(POISON)
    return tensor


def resized(storage: torch.UntypedStorage, nbytes: int) -> bool:
    """Free or take back a storage's memory; its bytes stay where they are, poisoned.

    Returns:
        False where the size is none that the storage had: then nothing is done.
    """
    allocation: Allocation | None = storage.__dict__.get("allocation")
    if allocation is None or nbytes not in (0, allocation.nbytes):
        return False
    if allocation.is_freed == (nbytes == 0):
        return True
    allocation.is_freed = nbytes == 0
    if allocation.is_freed:
        USAGE.freed(allocation)
        allocation.others.clear()
        USAGE.take(-allocation.nbytes)
    else:
        allocation.home = USAGE.current_stream()
        USAGE.take(allocation.nbytes)
        USAGE.allocated(allocation)
    ctypes.memset(allocation.address, POISON, allocation.nbytes)
    return True
