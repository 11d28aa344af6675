"""Time small pieces of work on a device that others may share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from meshwright.core.devices import is_accelerator

Work = Callable[[], Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and for how long.

    Attributes:
        dims: dims of products.
        dtypes: names of the dtypes of products and attention.
        seqs: tokens of attention.
        head_dims: dims of a head.
        sizes: bytes of what memory-bound operators read and write.
        elements: elements of a parameter.
        messages: bytes of messages.
        window_s: shortest time over which calls are averaged.
        windows: such times of each point.
    """

    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    seqs: tuple[int, ...]
    head_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: tuple[int, ...]
    messages: tuple[int, ...]
    window_s: float
    windows: int


KIB, MIB = 2**10, 2**20
FULL = Effort(
    dims=(16, 64, 256, 1024),
    dtypes=("float32", "bfloat16"),
    seqs=(32, 128, 512, 1024),
    head_dims=(16, 32, 64, 128),
    sizes=(KIB, 16 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB),
    elements=(64, 4096, 65_536, 1_048_576),
    messages=(64, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    window_s=0.003,
    windows=5,
)
"""The effort on a CPU."""
ACCELERATED = Effort(
    dims=(64, 256, 1024, 4096, 8192),
    dtypes=("float32", "bfloat16"),
    seqs=(128, 512, 2048, 8192),
    head_dims=(64, 128),
    sizes=(4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB),
    elements=(1024, 65_536, 1_048_576, 16_777_216),
    messages=(64, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB),
    window_s=0.005,
    windows=5,
)
SHORTEST = Effort(
    dims=(16, 64),
    dtypes=("float32",),
    seqs=(16, 64),
    head_dims=(16,),
    sizes=(KIB, 64 * KIB),
    elements=(64, 4096),
    messages=(64, 64 * KIB),
    window_s=0.0002,
    windows=2,
)
"""Enough to see that everything is measured; the figures are coarse."""


def seconds_of(work: Work, device: torch.device, effort: Effort) -> float:
    """Return the seconds of a call, averaged over windows of calls, of which the median counts.

    On an accelerator a window ends when the device has done its work: what counts is the slower of host and device.
    """
    work()
    calls = 1
    while (spent := _spent(work, calls, device)) < effort.window_s:
        calls = max(calls + 1, min(10 * calls, int(1.3 * calls * effort.window_s / max(spent, 1e-9))))
    found = [spent, *(_spent(work, calls, device) for _ in range(effort.windows - 1))]
    return max(median(found) / calls, 1e-9)


def _spent(work: Work, calls: int, device: torch.device) -> float:
    # one thread's own time leaves out when the host runs other programs
    now = time.perf_counter if is_accelerator(device) or torch.get_num_threads() > 1 else time.thread_time
    _finish(device)
    began = now()
    for _ in range(calls):
        work()
    _finish(device)
    return now() - began


def _finish(device: torch.device) -> None:
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)
