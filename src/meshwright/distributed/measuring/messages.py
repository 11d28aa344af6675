"""Measure messages between this job's ranks, and how much slower ranks are that share a host's cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.devices import CPU, finish_stream, is_accelerator

from .products import SHORTEST, Effort, Points, Work, seconds_of

gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WARM, ROUNDS, PIECES = 2, 3, 2
LONG_S = 0.15
"""Seconds in which ranks are compared that share cores: several turns of the operating system's scheduler."""


def group_sizes(world: int) -> list[int]:
    """List the sizes of groups to measure: powers of two below the world, and the world."""
    return [size for size in (2**power for power in range(1, 12)) if size < world] + ([world] if world > 1 else [])


def messages(device: torch.device, effort: Effort, at_ease: int) -> Iterator[tuple[str, Points]]:
    """Yield "kind ranks", and (bytes of the larger side, seconds). Collective; one rank yields nothing.

    All groups of a size send at once, as the groups of a mesh do.

    Args:
        at_ease: ranks of a host that have cores of their own.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    between = Between.of(device, effort, at_ease, world) if world > 1 else Between(None, 0.0)
    for size in group_sizes(world):
        starts = range(0, world - size + 1, size)
        groups = [dist.new_group(list(range(start, start + size))) for start in starts]
        place = dist.get_rank() // size
        mine = groups[place] if place < len(groups) else None
        group = mine if isinstance(mine, dist.ProcessGroup) else None
        for kind, make in COLLECTIVES.items():
            if kind == "send" and size > 2:
                continue
            points = []
            for sent in effort.messages:
                whole = torch.zeros(max(size, sent // 4 // size * size), device=device)
                work = make(whole, group, size) if group is not None else bool
                points.append((float(sent), _slowest(_message_s(work, group, between, device, effort), device)))
            yield f"{kind} {size}", points
        if group is not None:
            dist.destroy_process_group(group)


def _message_s(
    work: Work, group: dist.ProcessGroup | None, between: Between, device: torch.device, effort: Effort
) -> float:
    """Return the seconds of one of several messages with work between them; all ranks of the group send as many."""
    if group is None:
        dist.barrier()
        return 0.0
    both = between.then(work)
    for _ in range(WARM):
        both()
    guess = torch.tensor([_spent(both, 3, device) / 3], dtype=torch.float64, device=device)
    dist.all_reduce(guess, op=dist.ReduceOp.MAX, group=group)
    calls = max(2, min(200, int(4 * effort.window_s / float(guess))))
    dist.barrier()
    spent = min(_spent(both, calls, device) / calls for _ in range(effort.windows))
    return max(spent - between.seconds, 1e-6)


@dataclass(frozen=True)
class Between:
    """Work between two messages: ranks of a run come to them from work, not at once, and with other data in caches.

    Attributes:
        seconds: its seconds where all ranks of a host do it at once.
    """

    work: Work | None
    seconds: float

    @classmethod
    def of(cls, device: torch.device, effort: Effort, at_ease: int, ranks: int) -> Between:
        """Make such work, and time it; on an accelerator there is none, since messages travel beside it."""
        if is_accelerator(device):
            return cls(None, 0.0)
        a, weights = torch.full((128, 256), 0.01), cycle([torch.full((256, 256), 0.01) for _ in range(16)])
        longer = cycle([torch.full((64 * 1024,), 0.01) for _ in range(16)])

        def work() -> None:
            for _ in range(PIECES):
                torch.mm(a, next(weights))
                torch.mul(next(longer), 2.0)

        return cls(work, seconds_of(work, device, effort) * max(1.0, ranks / at_ease))

    def then(self, message: Work) -> Work:
        """Return a call of the work, and then of a message."""
        work = self.work
        if work is None:
            return message

        def both() -> None:
            work()
            message()

        return both


def _spent(work: Work, calls: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    finish_stream(device)
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


def crowding(device: torch.device, effort: Effort, at_ease: int) -> list[float]:
    """Return the speed of a rank while 1, 2, … ranks of a host compute, over that of ``at_ease`` ranks. Collective.

    Accelerators do not share their units: 1 for each.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if is_accelerator(device) or world == 1:
        return [1.0] * world
    seconds = LONG_S if effort.window_s >= 0.001 else 0.02
    speeds = [_speed(working, seconds) for working in range(1, world + 1)]
    ease = min(at_ease, world)
    return [min(1.0, at_ease / working) * speeds[working - 1] / speeds[ease - 1] for working in range(1, world + 1)]


def _speed(working: int, seconds: float) -> float:
    """Return the rounds in a second of their own of the first ``working`` ranks; the others wait in a message.

    What other programs take of the cores is left out, and so is what ranks take of each other's: that is at_ease.
    """
    between = Between.of(torch.device(CPU), SHORTEST, 1, 1).work
    assert between is not None
    rounds, own = 0, 1.0
    dist.barrier()
    if dist.get_rank() < working:
        own, began = time.thread_time(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            between()
            rounds += 1
        own = time.thread_time() - own
    word = torch.tensor([rounds / own], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word) / working
