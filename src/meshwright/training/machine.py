"""Measure the machine that this job runs on: one profile, equal on all ranks."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from meshwright.core.devices import CPU, current_device, is_accelerator, local_device
from meshwright.core.errors import ConfigError
from meshwright.core.host import usable_cores
from meshwright.distributed import measuring
from meshwright.distributed.measuring import ACCELERATED, FULL, Effort
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerFailed, WorkerPool
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.distributed.setup import init_distributed
from meshwright.planning.layout import Layout
from meshwright.simulation.measured import MachineProfile, ProductGrid

MOST_RANKS = 64
"""Processes that are started on one host at most."""


def measure_here(ranks: int, effort: Effort | None = None) -> MachineProfile:
    """Measure this host with so many ranks, each a process of its own.

    Raises:
        ConfigError: a number of ranks that cannot be started here.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {ranks}: legal are 1 to {MOST_RANKS} on one host")
    device = local_device()
    if is_accelerator(device) and ranks > (present := torch.get_device_module(device).device_count()):
        raise ConfigError(
            f"--ranks {ranks}: this host has {present} devices of type {device}. Legal are 1 to {present}."
        )
    with closing(WorkerPool(ranks)) as pool:
        try:
            return pool.run(measure, effort)[0]
        except WorkerFailed as failure:
            if failure.error is None:
                raise
            raise failure.error from None


def measure(effort: Effort | None = None) -> MachineProfile:
    """Measure the machine of this process, with all ranks that a launcher started. Collective."""
    rank, _, world = get_world_info()
    init_distributed(Layout(dp_shard=world))
    kind = local_device()
    device, per_node = current_device(kind), ranks_per_node() or world
    effort = effort or (ACCELERATED if is_accelerator(kind) else FULL)
    cores = usable_cores()
    slots = per_node if is_accelerator(kind) else max(1, cores // torch.get_num_threads())
    memory, name = float(psutil.virtual_memory().total) / per_node, ""
    if is_accelerator(kind):
        memory = float(torch.get_device_module(device).mem_get_info(device)[1])
        name = torch.get_device_module(device).get_device_name(device)
    else:
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            name = next((f"{model}, {os.cpu_count()} cores" for model in named), "")
        name = name or platform.processor()

    def alone(work: Callable[[], Any]) -> Any:
        """Measure on as many ranks of a host as have cores of their own, at once, while the others wait. Collective.

        All ranks return the first one's figures; the others' work is that the memory is as busy as in a run.
        """
        agree.any_rank(False)
        return agree.from_rank_zero(work() if rank % per_node < min(per_node, slots) else None)

    return MachineProfile(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        torch=torch.__version__,
        device=kind,
        name=name or CPU,
        ranks=world,
        per_node=per_node,
        threads=torch.get_num_threads(),
        slots=slots,
        memory_bytes=memory,
        products=alone(lambda: {key: ProductGrid(*grid) for key, grid in measuring.products(device, effort).items()}),
        attention=alone(lambda: _frozen(measuring.attention(device, effort))),
        traffic=alone(lambda: _frozen(measuring.traffic(device, effort))),
        host=alone(lambda: measuring.host(device, effort)),
        optimizer=alone(lambda: _frozen(measuring.optimizer(device, effort))),
        messages=_frozen(measuring.messages(device, effort, slots)),
        crowding=tuple(measuring.crowding(device, effort, slots)),
    )


def _frozen(found: Any) -> dict[str, Any]:
    return {key: tuple(points) for key, points in found}
