"""A pretend GPU: a device that is not the CPU, on any machine, whose numbers are right and whose streams are watched.

``install()`` gives torch a device type "pretend", by torch's own means for back ends that are written in Python. Its
tensors have memory of their own, computed on by the CPU's kernels, so models train on it to the same numbers; its
messages go over the CPU's backend (gloo). Kernels run at once, whatever stream they are issued on, and
``watching()`` notes each one's stream, reads and writes: races between streams, memory freed too early, places where
the host waits, tensors of two devices, copies of pageable memory that were meant to be asynchronous, the order of
messages, and the number of kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import host, messages, operators, patches, timeline
from .device import PretendModule
from .findings import CollectiveCall, DeviceTrace, EarlyFree, HostRead, Line, Race
from .names import DEVICE_TYPE
from .operators import DeviceMixture
from .torch_private import register

__all__ = [
    "DEVICE_TYPE",
    "CollectiveCall",
    "DeviceMixture",
    "DeviceTrace",
    "EarlyFree",
    "HostRead",
    "Line",
    "Race",
    "install",
    "installed",
    "watching",
]

_module: PretendModule | None = None
_libraries: list[object] = []


def install() -> PretendModule:
    """Give torch the device "pretend", for the rest of this process, and return its module ``torch.pretend``."""
    global _module
    if _module is None:
        _module = PretendModule()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that take another's place, as is meant here
            register(DEVICE_TYPE, _module)
            _libraries.extend([*operators.install(), messages.install()])
        patches.install()
        # Python's exceptions end the process in a thread of autograd's that runs an operator written in C++
        torch.autograd.set_multithreading_enabled(False)
    return _module


def installed() -> bool:
    """Return whether torch has the device."""
    return _module is not None


@contextmanager
def watching() -> Iterator[DeviceTrace]:
    """Note what is done on the device, in all threads of this process.

    Raises:
        RuntimeError: without ``install()``.
    """
    if _module is None:
        raise RuntimeError("call pretend_gpu.install() first: it gives torch the device that is watched")
    watch = timeline.begin()
    try:
        with host.HostAccesses(watch):
            yield watch.seen
    finally:
        timeline.end()
