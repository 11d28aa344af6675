"""Count every c10d operation that torch dispatches, below meshwright's code, with its bytes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.torch_private import group_of_recorder
from meshwright.planning.traffic import wire_bytes

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""torch's operation names -> meshwright's; any other c10d operation keeps torch's name, so that each is counted."""


@dataclass(frozen=True)
class Sent:
    """One collective as it was issued: ``tensor_bytes`` of its larger side, over ``ranks`` ranks.

    ``kept``: bytes that go to this rank itself, where ranks get unequal parts.
    """

    op: str
    ranks: int
    tensor_bytes: int
    kept: int | None = None

    @property
    def bytes(self) -> float:
        """The bytes that this rank sends (see ``planning.collectives``)."""
        if self.kept is not None:
            return self.tensor_bytes - self.kept
        return wire_bytes(self.op, self.tensor_bytes, self.ranks)


class WireCounter(TorchDispatchMode):
    """A counter: ``with WireCounter() as wire``; ``wire.sent`` (in order), ``wire.operations`` (all dispatched)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operations[str(func)] += 1
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(name_of_operator(func), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple) -> None:
        sent = sent_by(name, args)
        if sent is not None:
            self.sent.append(sent)


def name_of_operator(operator: Any) -> str:
    """Return an operator's name without namespace and overload: "add" of aten::add.Tensor."""
    return operator.name().partition("::")[2].partition(".")[0]


def sent_by(name: str, args: tuple) -> Sent | None:
    """Return the message that an operator of this name sends with these arguments; None if it sends nothing."""
    if name in ("wait_tensor", "barrier", "recv_"):  # a receiver sends nothing
        return None
    group = next((g for a in args if (g := group_in(a)) is not None), None)
    ranks = 2 if name == "send" else group.size() if group is not None else dist.get_world_size()
    if name == "all_gather_into_tensor":  # compiled code gives one side alone, the smaller
        args = (*args, [args[0]] * ranks)
    sides = [sum(t.numel() * t.element_size() for t in _tensors(argument)) for argument in args]
    if name == "alltoall_base_":
        _, given, _, _, splits, *_ = args
        rank, row = dist.get_rank(group), given[:1].numel() * given.element_size()
        return Sent(KINDS[name], ranks, sides[1], splits[rank] * row if splits else None)
    return Sent(KINDS.get(name, name), ranks, max(sides))


def ranks_in(args: tuple) -> tuple[int, ...]:
    """Return the ranks of the process group among an operator's arguments; all ranks if there is none."""
    group = next((found for argument in args if (found := group_in(argument)) is not None), None)
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def group_in(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of an operator is, or names; None if it is something else."""
    if isinstance(value, str):
        return group_of_recorder(value)
    if isinstance(value, torch.ScriptObject):
        with suppress(RuntimeError, TypeError):  # a script object of another kind, such as a reduce operation
            return dist.ProcessGroup.unbox(value)
    return None
