"""Let ranks agree on every decision that changes control flow; without a process group, each decides alone.

Where the peers are absent (``absent_peers``), they are taken to have this rank's values.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.devices import current_device, is_accelerator, local_device
from meshwright.core.errors import MeshwrightError
from meshwright.core.torch_private import by_values
from meshwright.distributed.torch_private import set_group_timeout
from meshwright.introspection.constructor import seeded

from .absent_peers import peers_are_absent

Result = TypeVar("Result")


def word_device() -> torch.device:
    """Return the device of small agreed values: the CPU where it has a backend (no sync), else the accelerator."""
    if not dist.is_initialized() or "cpu" in str(dist.get_backend_config()) or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return current_device(local_device())


def alone() -> bool:
    """Return whether there are no other ranks to agree with."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def any_rank(flag: bool) -> bool:
    """Return, on every rank, whether the flag is set on any rank."""
    return largest(int(flag)) > 0


def largest(value: int) -> int:
    """Return the largest of all ranks' values."""
    if alone():
        return value
    word = torch.tensor(value, dtype=torch.int64, device=word_device())
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return int(word.item())


def largest_each(values: torch.Tensor) -> torch.Tensor:
    """Return the elementwise maximum of all ranks' float64 values, on the CPU."""
    if alone():
        return values.cpu()
    words = values.to(word_device())
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return words.cpu()


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's value on every rank (small Python values)."""
    if alone() or peers_are_absent():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=word_device())
    return box[0]


def everybody_says(value: Any) -> list[Any]:
    """Gather all ranks' values in rank order (small Python values)."""
    if alone() or peers_are_absent():
        return [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def equal_over(words: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Compare (n,) int64 values over all ranks of every group, and return (n,) bool on the CPU, true where equal."""
    same = torch.ones(words.shape[0], dtype=torch.bool)
    for group in groups:
        low, high = words.clone(), words.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        same &= (low == high).cpu()
    return same


def is_equal(word: int | None, groups: list[dist.ProcessGroup]) -> bool:
    """Return whether the ranks of each group bring the same number (None: no number): one all-reduce per group."""
    if not groups:
        return True
    least = torch.iinfo(torch.int64).min
    both = torch.tensor([least, least] if word is None else [word, -word], dtype=torch.int64, device=word_device())
    for group in groups:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = both.tolist()
    return largest in (-smallest, least)


def set_timeout(seconds: float, groups: list[dist.ProcessGroup]) -> None:
    """Set the time limit of collectives of these groups, and of the default group, to ``seconds``."""
    for group in [] if peers_are_absent() else [dist.group.WORLD, *groups]:
        if group is not None:
            set_group_timeout(group, seconds)


def largest_of_copies(norm: float, groups: list[dist.ProcessGroup]) -> float:
    """Return the largest norm over the ranks of some groups; NaN if one is not finite."""
    if not groups:
        return norm
    word = torch.tensor(norm if math.isfinite(norm) else math.inf, dtype=torch.float64, device=word_device())
    for group in groups:
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
    found = float(word.item())
    return found if math.isfinite(found) else math.nan


def total(words: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Sum numbers elementwise over all groups (one small all-reduce per group), and return them on the CPU."""
    if not groups:
        return words.cpu()
    words = words.to(word_device())
    for group in groups:
        dist.all_reduce(words, group=group)
    if not peers_are_absent():
        return words.cpu()
    # absent peers counted nothing: each is taken to have brought as much
    return by_values(torch.mul)(words.cpu(), math.prod(map(dist.get_world_size, groups)))


def together(action: Callable[[], Result], *, here: bool = True) -> Result | None:
    """Run an action on the ranks where ``here`` is true, and raise the error of one rank on all.

    Else the others would wait in their next collective until its time limit. The action itself sends no messages.
    """
    result, problem = None, None
    if here:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  (raised again below, on every rank)
            problem = portable(error)
    if any_rank(problem is not None):
        _raise_first(everybody_says(problem))
    return result


def _raise_first(problems: Iterable[Exception | None]) -> None:
    for first in problems:
        if first is not None:
            first.__dict__["is_agreed"] = True
            raise first


def decided_once(decide: Callable[[], Result]) -> Result:
    """Return rank 0's result of ``decide`` (a value that can be pickled) on every rank, or raise its error on all.

    ``decide`` runs as if there were no process group, whose messages would wait for ranks that do not run it, and with
    random streams of its own: this rank's are to stay as the others'.
    """
    if alone():
        return decide()

    def decide_alone() -> Result:
        world, dist.group.WORLD = dist.group.WORLD, None
        try:
            with seeded(0):
                return decide()
        finally:
            dist.group.WORLD = world

    if peers_are_absent():
        return decide_alone()
    return from_rank_zero(together(decide_alone, here=dist.get_rank() == 0))


def is_agreed(error: BaseException) -> bool:
    """Return whether every rank raises this error (it came through ``together``)."""
    return getattr(error, "is_agreed", False)


def raise_first(problem: Exception | None, groups: list[dist.ProcessGroup]) -> None:
    """Raise the error of the first rank that has one, on all ranks of the groups. Collective."""
    problems: list[Any] = [problem and portable(problem)]
    for group in groups:
        mine = next((p for p in problems if p is not None), None)
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, mine, group=group)
    _raise_first(problems)


def portable(error: Exception) -> Exception:
    """Return the error if it survives pickling, else a MeshwrightError with its text, for all ranks to raise."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001  (pickling may raise anything; the error itself must still be reported)
        pass
    return MeshwrightError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Open:
    """A check whose outcome is on its way to the host.

    Attributes:
        holds: on the device; false once any check of the same error failed.
        word: the same on the host, which ``arrival`` is behind.
    """

    error: Exception
    holds: Tensor
    word: Tensor
    arrival: Any


class Verdicts:
    """Checks that a device computes: on the CPU an error is raised at once, else as soon as the host knows.

    An error of checks on an accelerator is raised by the first ``raise_known`` behind the arrival of its outcome. Where
    the host has waited for the device anyway, as it does for a norm before the optimizer's step, that is every check.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def expect(self, holds: Tensor, error: Exception) -> None:
        """Raise the error unless a bool of no dims is true; on an accelerator, let ``raise_known`` do so."""
        if not is_accelerator(holds.device):
            if not bool(holds):
                raise error
            return
        if (before := self._open.get(str(error))) is not None:
            holds = holds & before.holds
        word = holds.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        stream = torch.get_device_module(holds.device).current_stream(holds.device)
        self._open[str(error)] = _Open(error, holds, word, stream.record_event())

    def raise_known(self) -> None:
        """Raise the error of a check that is known to have failed; those that are not known stay open."""
        for text, check in list(self._open.items()):
            if check.arrival.query():
                del self._open[text]
                if not bool(check.word):
                    raise check.error
