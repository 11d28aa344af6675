"""Let one process be any rank of a world in which no other rank answers.

Collectives return at once, with this rank's own values in its peers' places (torch's "fake" backend), so that the very
code of a run can be executed for one rank: on a device (a rehearsal), or on tensors without memory (a dry run). What
only a peer has (a received tensor, a peer's part of a sum of activations) is made up of small random numbers: zeros
would all go to the same experts, and memory that nobody wrote may hold a NaN. Messages take no time, or as much as the
caller foresees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.devices import CPU, local_device
from meshwright.core.errors import ConfigError
from meshwright.core.torch_private import tree_leaves
from meshwright.distributed.torch_private import (
    finished_work,
    forget_meshes,
    occupy_stream,
    other_groups,
    other_kernels,
    silent_store,
)

from .wire import ranks_in, sent_by

BACKEND = "fake"
"""torch's name of the backend."""
SCALE, DIRECTIONS = 0.02, 8
"""Standard deviation of made-up values, as of embeddings at the start; rank of a peer's part of a sum."""


Duration = Callable[[str, tuple[int, ...], int], float]
"""Seconds of a message by its operation, the ranks that take part, and the bytes of its larger side."""


@contextmanager
def absent_peers(rank: int, world: int, duration: Duration | None = None) -> Iterator[None]:
    """Make this process rank ``rank`` of ``world`` for the time of the context; existing groups are set aside.

    Args:
        duration: seconds for which a message keeps the stream that issues it busy, or the CPU; None: none.

    Raises:
        ConfigError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} ranks: legal are 0 to {world - 1}")
    with other_groups(), _making_up_values(duration):
        forget_meshes()  # torch's caches know meshes by their ranks' numbers: those of a run are equal
        dist.init_process_group(BACKEND, store=silent_store(), rank=rank, world_size=world)
        try:
            yield
        finally:
            forget_meshes()


def peers_are_absent() -> bool:
    """Return whether this process runs inside ``absent_peers``."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


@contextmanager
def _making_up_values(duration: Duration | None) -> Iterator[None]:
    """Give torch's operators for messages other kernels, which fill in what only a peer has.

    Kernels lie below dispatch modes, so that nobody counts what they do.
    """
    kernels = _KERNELS if duration is None else {name: _lasting(name, _KERNELS[name], duration) for name in _KERNELS}
    with other_kernels("c10d", kernels, {CPU, local_device()}):
        try:
            yield
        finally:
            _generator.cache_clear()
            _directions.cache_clear()


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
    return _work(tensors)


def _send(tensors: list[Tensor], group: Any, target: int, tag: int) -> Any:
    return _work(tensors)


def _broadcast(tensors: list[Tensor], group: Any, root: int, *options: Any) -> tuple[list[Tensor], Any]:
    return tensors, _work(tensors)  # a rank that is not the root keeps what it has


def _scatter(
    outputs: list[Tensor], inputs: list[list[Tensor]], group: Any, root: int, *options: Any
) -> tuple[list[Tensor], Any]:
    here = dist.ProcessGroup.unbox(group).rank()
    for place, output in enumerate(outputs):
        output.copy_(inputs[place][here]) if here == root else _fill(output)
    return outputs, _work(outputs)


def _gather(output: Tensor, given: Tensor, group: Any, *options: Any) -> tuple[Tensor, Any]:
    """Copy by three kernels, where torch's backend takes one for each rank; ``given`` may lie in its place already."""
    ranks = dist.ProcessGroup.unbox(group)
    parts, here = output.view(ranks.size(), given.numel()), ranks.rank()
    mine = given.reshape(1, -1)
    if parts[here].data_ptr() != given.data_ptr():
        parts[here].copy_(mine[0])
    for others in (parts[:here], parts[here + 1 :]):
        others.copy_(mine.expand_as(others))
    return output, _work([output])


def _trade(output: Tensor, given: Tensor, group: Any, *options: Any) -> Any:
    into, mine = output.view(-1), given.reshape(-1)
    same = min(into.numel(), mine.numel())
    into[:same].copy_(mine[:same])
    _fill(into[same:])
    return _work([output])


def _reduce(tensors: list[Tensor], group: Any, *options: Any) -> tuple[list[Tensor], Any]:
    for tensor in tensors:
        _add_peers(tensor)
    return tensors, _work(tensors)


def _reduce_and_scatter(output: Tensor, given: Tensor, group: Any, *options: Any) -> tuple[Tensor, Any]:
    ranks = dist.ProcessGroup.unbox(group)
    output.copy_(given.chunk(ranks.size())[ranks.rank()].view_as(output))
    _add_peers(output)
    return output, _work([output])


_KERNELS = {
    "recv_": _receive,
    "send": _send,
    "broadcast_": _broadcast,
    "scatter_": _scatter,
    "_allgather_base_": _gather,
    "alltoall_base_": _trade,
    "allreduce_": _reduce,
    "_reduce_scatter_base_": _reduce_and_scatter,
}


def _work(made: list[Tensor]) -> Any:
    """Return the finished work of a message, with its result."""
    return finished_work(made).boxed()


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
