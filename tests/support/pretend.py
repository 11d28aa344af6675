"""Jobs on the pretend device: workers of their own have it, since a process keeps a device for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshwright.distributed.process.world import STORE

from . import pretend_gpu

DEVICE = pretend_gpu.DEVICE_TYPE
BACKEND = f"cpu:gloo,{DEVICE}:{DEVICE}"


def with_device(job: Any, *args: Any) -> Any:
    """Run a job in a process that has the device."""
    pretend_gpu.install()
    return job(*args)


def watched_record(way: Any, folder: str, mutant: str = "") -> Any:
    """Return ``ways.record`` of a way that is laid out on the device, its last step watched."""
    from .ways import record

    pretend_gpu.install()
    return record(way, folder, mutant, pretend_gpu.watching)


@contextmanager
def a_group() -> Iterator[int]:
    """Give a process group whose device messages are watched, and this rank's number."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.FileStore(os.environ[STORE], world))
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to a device as a loader does: from pinned memory, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device == DEVICE else tensor
