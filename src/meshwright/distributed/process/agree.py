"""Let ranks agree: every decision that changes control flow passes through here.

Without a process group every function returns its argument.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.core.errors import MeshwrightError
from meshwright.distributed.torch_private import set_group_timeout

Result = TypeVar("Result")


def word_device() -> torch.device:
    """Tell where small agreed values live: the CPU where a CPU back end exists (no device synchronisation), else the
    accelerator.
    """
    if "cpu" in str(dist.get_backend_config()) or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def alone() -> bool:
    """Tell whether there is nobody to agree with."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def any_rank(flag: bool) -> bool:
    """True on every rank when it is on one."""
    return largest(int(flag)) > 0


def largest(value: int) -> int:
    """Return the largest of all ranks' values."""
    if alone():
        return value
    word = torch.tensor(value, dtype=torch.int64, device=word_device())
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return int(word.item())


def largest_each(values: torch.Tensor) -> torch.Tensor:
    """Elementwise, the largest of all ranks' float64 values; on the CPU."""
    if alone():
        return values.cpu()
    words = values.to(word_device())
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return words.cpu()


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's value, on every rank (small Python values)."""
    if alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=word_device())
    return box[0]


def everybody_says(value: Any) -> list[Any]:
    """Return all ranks' values, in rank order (small Python values)."""
    if alone():
        return [value]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def wait_for_all() -> None:
    """A barrier."""
    if not alone():
        largest(0)


def equal_over(words: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Elementwise, whether all ranks of every group hold the same int64 value. words: (n,) int64.

    Returns (n,) bool on CPU.
    """
    same = torch.ones(words.shape[0], dtype=torch.bool)
    for group in groups:
        low, high = words.clone(), words.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        same &= (low == high).cpu()
    return same


def set_timeout(seconds: float, groups: list[dist.ProcessGroup]) -> None:
    """Let collectives of these groups (and of the default one) fail after ``seconds``."""
    for group in [dist.group.WORLD, *groups]:
        if group is not None:
            set_group_timeout(group, seconds)


def largest_of_copies(norm: float, groups: list[dist.ProcessGroup]) -> float:
    """Return the largest norm of the ranks of some groups; NaN where one is not finite."""
    if not groups:
        return norm
    word = torch.tensor(norm if math.isfinite(norm) else math.inf, dtype=torch.float64, device=word_device())
    for group in groups:
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
    found = float(word.item())
    return found if math.isfinite(found) else math.nan


def total(words: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Elementwise sum of numbers over the ranks of all groups (one small all-reduce per group).

    Returns them on the CPU.
    """
    if groups:
        words = words.to(word_device())
        for group in groups:
            dist.all_reduce(words, group=group)
    return words.cpu()


def together(action: Callable[[], Result], *, here: bool = True) -> Result | None:
    """Do something on the ranks where ``here`` is true; when it raises on one rank, that error is raised on all.

    Without it the others would wait in their next collective until its time limit.
    """
    result, problem = None, None
    if here:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  (raised again below, on every rank)
            problem = portable(error)
    first = next((said for said in everybody_says(problem) if said is not None), None)
    if first is not None:
        first.__dict__["is_agreed"] = True
        raise first
    return result


def decided_once(decide: Callable[[], Result]) -> Result:
    """Return what ``decide`` gives on rank 0, on every rank (a value that can be pickled).

    What it raises there is raised on all.

    ``decide`` runs as if there were no process group: a model that sends messages in its forward would wait for ranks
    that do not run it.
    """
    if alone():
        return decide()

    def decide_alone() -> Result:
        world, dist.group.WORLD = dist.group.WORLD, None
        try:
            return decide()
        finally:
            dist.group.WORLD = world

    return from_rank_zero(together(decide_alone, here=dist.get_rank() == 0))


def is_agreed(error: BaseException) -> bool:
    """Tell whether every rank raises this error (it came through ``together``)."""
    return getattr(error, "is_agreed", False)


def raise_first(problem: Exception | None, groups: list[dist.ProcessGroup]) -> None:
    """Raise, on all ranks of the groups, the problem of the first rank that has one (collective; nothing where none
    has).
    """
    said: list[Any] = [problem and portable(problem)]
    for group in groups:
        mine = next((p for p in said if p is not None), None)
        said = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    first = next((p for p in said if p is not None), None)
    if first is not None:
        first.__dict__["is_agreed"] = True
        raise first


def portable(error: Exception) -> Exception:
    """Return the error itself where it survives pickling, else one of ours with its words: the other ranks must be
    able to raise it.
    """
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001  (whatever pickling does to an error, the error is what must be told)
        pass
    return MeshwrightError(f"{type(error).__name__}: {error}")
