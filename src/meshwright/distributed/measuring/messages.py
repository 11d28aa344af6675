"""Measure messages between this job's ranks, and how much slower ranks are that share a host's cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.core.devices import is_accelerator

from .clock import Effort, Points, Work, seconds_of

gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WARM, ROUNDS = 2, 3
LONG_S = 0.15
"""Seconds in which ranks are compared that share cores: several turns of the operating system's scheduler."""


def group_sizes(world: int) -> list[int]:
    """List the sizes of groups to measure: powers of two below the world, and the world."""
    return [size for size in (2**power for power in range(1, 12)) if size < world] + ([world] if world > 1 else [])


def messages(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield "kind ranks", and (bytes of the larger side, seconds). Collective; one rank yields nothing.

    All groups of a size send at once, as the groups of a mesh do.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    for size in group_sizes(world):
        starts = range(0, world - size + 1, size)
        groups = [dist.new_group(list(range(start, start + size))) for start in starts]
        place = dist.get_rank() // size
        mine = groups[place] if place < len(groups) else None
        group = mine if isinstance(mine, dist.ProcessGroup) else None
        for kind, make in COLLECTIVES.items():
            if kind == "send" and size > 2:
                continue
            points = [
                (float(sent), _slowest(_message_s(make, group, size, sent, device, effort), device))
                for sent in effort.messages
            ]
            yield f"{kind} {size}", points
        if group is not None:
            dist.destroy_process_group(group)


def _message_s(
    make: Callable[..., Work],
    group: dist.ProcessGroup | None,
    size: int,
    sent: int,
    device: torch.device,
    effort: Effort,
) -> float:
    """Return the seconds of one of several messages, one after the other; all ranks of the group take as many."""
    if group is None:
        dist.barrier()
        return 0.0
    work = make(torch.zeros(max(size, sent // 4 // size * size), device=device), group, size)
    for _ in range(WARM):
        work()
    guess = torch.tensor([_spent(work, 3, device) / 3], dtype=torch.float64, device=device)
    dist.all_reduce(guess, op=dist.ReduceOp.MAX, group=group)
    calls = max(2, min(200, int(4 * effort.window_s / float(guess))))
    dist.barrier()
    return sorted(_spent(work, calls, device) / calls for _ in range(max(2, effort.windows)))[1]


def _spent(work: Work, calls: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter() - began


def _slowest(seconds: float, device: torch.device) -> float:
    word = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return float(word)


def _gather(whole: Tensor, group: dist.ProcessGroup, size: int) -> Work:
    part = torch.zeros(whole.numel() // size, device=whole.device)
    return partial(gather_tensor, whole, part, group=group)


def _scatter(whole: Tensor, group: dist.ProcessGroup, size: int) -> Work:
    part = torch.zeros(whole.numel() // size, device=whole.device)
    return partial(scatter_tensor, part, whole, group=group)


def _reduce(whole: Tensor, group: dist.ProcessGroup, size: int) -> Work:
    return partial(dist.all_reduce, whole, group=group)


def _trade(whole: Tensor, group: dist.ProcessGroup, size: int) -> Work:
    return partial(dist.all_to_all_single, torch.zeros_like(whole), whole, group=group)


def _send(whole: Tensor, group: dist.ProcessGroup, size: int) -> Work:
    if dist.get_rank(group) == 0:
        return lambda: dist.send(whole, group=group, group_dst=1)
    return lambda: dist.recv(whole, group=group, group_src=0)


COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup, int], Work]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_reduce": _reduce,
    "all_to_all": _trade,
    "send": _send,
}


def silent_seconds(device: torch.device, effort: Effort) -> tuple[float, float]:
    """Return what an operator on a DTensor costs beyond a plain one, and a message of a rank whose peers are absent."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    local = torch.zeros(8, device=device)
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    extra = seconds_of(lambda: sharded.mul_(1.0), device, effort) - seconds_of(lambda: local.mul_(1.0), device, effort)
    gather = _gather(torch.zeros(16, device=device), dist.group.WORLD, 2)  # type: ignore[arg-type]
    return max(1e-9, extra), seconds_of(gather, device, effort)


def busy(device: torch.device, effort: Effort) -> float:
    """Return the cores that a rank occupies while a message travels, all its threads together. Collective."""
    if not dist.is_initialized() or is_accelerator(device):
        return 0.0
    work = _reduce(torch.zeros(effort.messages[-1] // 4), dist.group.WORLD, dist.get_world_size())  # type: ignore[arg-type]
    work()
    dist.barrier()
    spent, began = time.process_time(), time.perf_counter()
    for _ in range(ROUNDS):
        work()
    cores = (time.process_time() - spent) / (time.perf_counter() - began)
    word = torch.tensor([cores], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word) / dist.get_world_size()


def crowding(device: torch.device, effort: Effort, at_ease: int) -> list[float]:
    """Return the speed of a rank while 1, 2, … ranks of a host compute, over that of ``at_ease`` ranks. Collective.

    Accelerators do not share their units: 1 for each.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if is_accelerator(device) or world == 1:
        return [1.0] * world
    seconds = LONG_S if effort.window_s >= 0.001 else 0.02
    speeds = [_speed(working, seconds) for working in range(1, world + 1)]
    return [speed / speeds[min(at_ease, world) - 1] for speed in speeds]


def _speed(working: int, seconds: float) -> float:
    """Return the rounds per second of the first ``working`` ranks; the others wait in a message."""
    a, wide = torch.full((128, 256), 0.01), cycle([torch.full((256, 256), 0.01) for _ in range(16)])
    long = cycle([torch.full((64 * 1024,), 0.01) for _ in range(16)])
    done, began = 0, time.perf_counter()
    dist.barrier()
    if dist.get_rank() < working:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            torch.mm(a, next(wide))
            torch.mul(next(long), 2.0)
            done += 1
    word = torch.tensor([done / (time.perf_counter() - began)], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word) / working
