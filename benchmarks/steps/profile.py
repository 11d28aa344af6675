"""Measure what forecasts of steps need beside the profile of ``meshwright measure``."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist

from meshwright.core.devices import current_device, is_accelerator, local_device
from meshwright.distributed.measuring import COLLECTIVES, FULL, Effort
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerPool
from meshwright.simulation.measured import MachineProfile
from meshwright.training.machine import measure

MESSAGES = 8


@dataclass(frozen=True)
class InSteps:
    """How work and messages differ within a step of several ranks from each by itself.

    Attributes:
        computing: factor of an operator's seconds.
        host: factor of the host's seconds around operators.
        message: seconds by which a message takes longer.
    """

    computing: float
    host: float
    message: float


ALONE = InSteps(1.0, 1.0, 0.0)


@dataclass(frozen=True)
class StepProfile(MachineProfile):
    """A machine's profile, with what its steps add.

    Attributes:
        busy: cores that a rank occupies while it waits in a message and the message travels.
        in_steps: what a step of several ranks adds to operators and messages.
    """

    busy: float
    in_steps: InSteps


def measure_here(ranks: int) -> StepProfile:
    """Measure this host with so many ranks, each a process of its own."""
    with closing(WorkerPool(ranks)) as pool:
        return pool.run(measure_steps)[0]


def measure_steps(effort: Effort = FULL) -> StepProfile:
    """Measure the machine of this process. Collective."""
    from .around import host_around
    from .in_steps import within_steps

    plain = measure(effort)
    device = current_device(local_device())
    values = {field.name: getattr(plain, field.name) for field in fields(MachineProfile)}
    found = StepProfile(**values, busy=busy(device, effort), in_steps=ALONE)
    around = agree.from_rank_zero(host_around(found, device, effort))
    found = replace(found, host={**found.host, **around})
    return replace(found, in_steps=within_steps(found, device, effort))


def busy(device: torch.device, effort: Effort) -> float:
    """Return the cores that a rank occupies while a message travels, all its threads together. Collective."""
    if not dist.is_initialized() or is_accelerator(device):
        return 0.0
    work = COLLECTIVES["all_reduce"](torch.zeros(effort.messages[-1] // 4), dist.group.WORLD, dist.get_world_size())  # type: ignore[arg-type]
    work()
    dist.barrier()
    spent, began = time.process_time(), time.perf_counter()
    for _ in range(MESSAGES):
        work()
    cores = (time.process_time() - spent) / (time.perf_counter() - began)
    word = torch.tensor([cores], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word) / dist.get_world_size()
