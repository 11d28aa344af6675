"""Read this process's memory: the allocator's on an accelerator, resident memory on a CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.devices import is_accelerator

if TYPE_CHECKING:
    import psutil
    import torch


@dataclass(frozen=True)
class MemoryReading:
    """Memory of this process at one moment."""

    current: int
    """Bytes held now."""
    peak: int
    """Bytes at the highest point: on an accelerator since the last reset, on a CPU since the process began."""
    label: str
    """Name of the quantity in ``peak``, short enough for a progress line."""


def read_memory(device: torch.device) -> MemoryReading:
    """Read the memory that this process holds for ``device``.

    On an accelerator: bytes that torch's allocator gave to tensors, without its cache, the driver's context, and the
    buffers of messages.
    Elsewhere: the resident set of the whole process, which is weights, but also the interpreter and its libraries,
    shared ones included. If the system records no peak (Linux does), the label says that the current value is shown.
    """
    if is_accelerator(device):
        import torch

        module = torch.get_device_module(device)
        return MemoryReading(module.memory_allocated(device), module.max_memory_allocated(device), "device peak")
    current = _process().memory_info().rss
    peak = _resident_peak()
    if peak is None:
        return MemoryReading(current, current, "RSS")
    return MemoryReading(current, max(current, peak), "RSS peak")


def reset_peak(device: torch.device) -> None:
    """Start a new peak on an accelerator, so that it covers the steps and not the start.

    A process's resident peak cannot be reset.
    """
    if is_accelerator(device):
        import torch

        torch.get_device_module(device).reset_peak_memory_stats(device)


@cache
def _process() -> psutil.Process:
    import psutil

    return psutil.Process()


def _resident_peak() -> int | None:
    # Not getrusage's ru_maxrss: a child inherits that from the launcher that forked it. VmHWM starts anew with the
    # program.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None
