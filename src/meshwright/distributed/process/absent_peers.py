"""Let one process be any rank of a world in which no other rank answers, and count its operators and messages.

Collectives return at once, with this rank's own values in its peers' places (torch's "fake" backend), so that the very
code of a run can be executed for one rank: on a device (a rehearsal), or on tensors without memory (a dry run). What
only a peer has (a received tensor, a peer's part of a sum of activations) is made up of small random numbers: zeros
would all go to the same experts, and memory that nobody wrote may hold a NaN. Messages take no time, or as much as the
caller foresees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.devices import CPU, local_device
from meshwright.core.errors import ConfigError
from meshwright.core.torch_private import TorchDispatchMode, tree_leaves
from meshwright.distributed.memory.live import tensors_in
from meshwright.distributed.torch_private import (
    finished_work,
    forget_meshes,
    group_of_recorder,
    occupy_stream,
    other_groups,
    other_kernels,
    silent_store,
)
from meshwright.planning.collectives import wire_bytes

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
    sides = [sum(t.numel() * t.element_size() for t in tensors_in(argument)) for argument in args]
    if name == "alltoall_base_":
        _, given, _, _, splits, *_ = args
        rank, row = dist.get_rank(group), given[:1].numel() * given.element_size()
        return Sent(KINDS[name], ranks, sides[1], splits[rank] * row if splits else None)
    return Sent(KINDS.get(name, name), ranks, max(sides))


def ranks_in(args: tuple) -> tuple[int, ...]:
    """Return the ranks of the process group among an operator's arguments; all ranks if there is none."""
    group = next((found for argument in args if (found := group_in(argument)) is not None), None)
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def group_in(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of an operator is, or names; None if it is something else."""
    if isinstance(value, str):
        return group_of_recorder(value)
    if isinstance(value, torch.ScriptObject):
        with suppress(RuntimeError, TypeError):  # a script object of another kind, such as a reduce operation
            return dist.ProcessGroup.unbox(value)
    return None


Operator = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""An operator's name, and (shape, dtype) of the tensors that it was given and those that it made."""
Message = tuple[str, tuple[int, ...], int, float]
"""A message's operation, the ranks that take part, the bytes of its larger side, and those that this rank sends."""


class OperatorRecorder(WireCounter):
    """A recorder: ``with OperatorRecorder() as seen``; then ``seen.operators`` and ``seen.messages``, in order.

    Operators on a DTensor are recorded as those on this rank's part. What compiled code does is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Operator] = []
        self.messages: list[Message] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such while it is recorded; torch would run it uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "prim":  # queries such as prim.device
            return func(*args, **(kwargs or {}))
        given = _described((args, kwargs))  # before an operator may resize them
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.recorded.append((str(func), given + _described(made)))
        return made

    def _note(self, name: str, args: tuple) -> None:
        before = len(self.sent)
        super()._note(name, args)
        ranks = ranks_in(args)
        self.messages.extend((sent.op, ranks, sent.tensor_bytes, sent.bytes) for sent in self.sent[before:])


def _described(value: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)


# --- let one process be any rank of a world in which no other rank answers

BACKEND = "fake"
"""torch's name of the backend."""
SCALE, DIRECTIONS = 0.02, 8
"""Standard deviation of made-up values, as of embeddings at the start; rank of a peer's part of a sum."""


Duration = Callable[[str, tuple[int, ...], int], float]
"""Seconds of a message by its operation, the ranks that take part, and the bytes of its larger side."""


@contextmanager
def absent_peers(rank: int, world: int, duration: Duration | None = None) -> Iterator[None]:
    """Make this process rank ``rank`` of ``world`` for the time of the context; existing groups are set aside.

    ``duration``: seconds for which a message keeps the stream that issues it busy, or the CPU; None: none.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} ranks: legal are 0 to {world - 1}")
    # kernels, which fill in what only a peer has, lie below dispatch modes, so that nobody counts what they do
    kernels = _KERNELS if duration is None else {name: _lasting(name, _KERNELS[name], duration) for name in _KERNELS}
    with other_groups(), other_kernels("c10d", kernels, {CPU, local_device()}):
        forget_meshes()  # torch's caches know meshes by their ranks' numbers: those of a run are equal
        dist.init_process_group(BACKEND, store=silent_store(), rank=rank, world_size=world)
        try:
            yield
        finally:
            forget_meshes()
            _generator.cache_clear()
            _directions.cache_clear()


def peers_are_absent() -> bool:
    """Return whether this process runs inside ``absent_peers``."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def _lasting(name: str, kernel: Callable[..., Any], duration: Duration) -> Callable[..., Any]:
    """Return a kernel that takes a message's time too."""

    def run(*args: Any) -> Any:
        made, sent = kernel(*args), sent_by(name, args)
        if sent is not None:
            device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            occupy_stream(device, duration(sent.op, ranks_in(args), sent.tensor_bytes))
        return made

    return run


def _receive(tensors: list[Tensor], group: Any, source: int, tag: int) -> Any:
    for tensor in tensors:
        _fill(tensor)
    return finished_work(tensors)


def _scatter(
    outputs: list[Tensor], inputs: list[list[Tensor]], group: Any, root: int, *options: Any
) -> tuple[list[Tensor], Any]:
    here = dist.ProcessGroup.unbox(group).rank()
    for place, output in enumerate(outputs):
        output.copy_(inputs[place][here]) if here == root else _fill(output)
    return outputs, finished_work(outputs)


def _gather(output: Tensor, given: Tensor, group: Any, *options: Any) -> tuple[Tensor, Any]:
    """Copy by three kernels, where torch's backend takes one for each rank; ``given`` may lie in its place already."""
    ranks = dist.ProcessGroup.unbox(group)
    parts, here = output.view(ranks.size(), given.numel()), ranks.rank()
    mine = given.reshape(1, -1)
    if parts[here].data_ptr() != given.data_ptr():
        parts[here].copy_(mine[0])
    for others in (parts[:here], parts[here + 1 :]):
        others.copy_(mine.expand_as(others))
    return output, finished_work([output])


def _trade(output: Tensor, given: Tensor, group: Any, *options: Any) -> Any:
    into, mine = output.view(-1), given.reshape(-1)
    same = min(into.numel(), mine.numel())
    into[:same].copy_(mine[:same])
    _fill(into[same:])
    return finished_work([output])


def _reduce(tensors: list[Tensor], group: Any, *options: Any) -> tuple[list[Tensor], Any]:
    for tensor in tensors:
        _add_peers(tensor)
    return tensors, finished_work(tensors)


def _reduce_and_scatter(output: Tensor, given: Tensor, group: Any, *options: Any) -> tuple[Tensor, Any]:
    ranks = dist.ProcessGroup.unbox(group)
    output.copy_(given.chunk(ranks.size())[ranks.rank()].view_as(output))
    _add_peers(output)
    return output, finished_work([output])


_KERNELS = {
    "recv_": _receive,
    "send": lambda tensors, *options: finished_work(tensors),
    "broadcast_": lambda tensors, *options: (tensors, finished_work(tensors)),  # but the root, a rank keeps what it has
    "scatter_": _scatter,
    "_allgather_base_": _gather,
    "alltoall_base_": _trade,
    "allreduce_": _reduce,
    "_reduce_scatter_base_": _reduce_and_scatter,
}


def _fill(tensor: Tensor) -> None:
    """Write small numbers: hidden states as they come, or gradients; whole numbers are 0."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.normal_(0, SCALE, generator=_generator(tensor.device))
    else:
        tensor.zero_()


def _add_peers(tensor: Tensor) -> None:
    """Add the peers' part to a sum of activations, (…, tokens, features), without memory of the sum's size.

    Numbers, words and flat buffers of gradients stay what they are: nothing depends on their values.
    """
    is_number = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    if tensor.dim() < 2 or not tensor.numel() or not is_number or not tensor.is_contiguous():
        return
    flat = tensor.view(-1, tensor.shape[-1])
    flat.addmm_(*_directions(*flat.shape, tensor.dtype, tensor.device))


@cache
def _directions(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw the factors of a matrix of low rank, (rows, DIRECTIONS) and (DIRECTIONS, width)."""
    generator, scale = _generator(device), (SCALE / DIRECTIONS**0.5) ** 0.5
    shapes = (rows, DIRECTIONS), (DIRECTIONS, width)
    left, right = (torch.randn(shape, dtype=dtype, device=device, generator=generator) * scale for shape in shapes)
    return left, right


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Return a stream beside those of the run, which draw what they would draw with peers."""
    return torch.Generator(device).manual_seed(0)
