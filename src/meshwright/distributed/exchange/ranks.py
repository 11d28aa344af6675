"""Exchange tensors among the ranks of one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.distributed.recompute.kept import exchanged, exchanging

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The new names since torch 2.13, if they exist."""


class RankGroup(Protocol):
    """Ranks of one axis, and the messages between them.

    ``gather`` and ``scatter`` are for activations (rows, tokens, …) that are cut along dim 1; the last rank's part may
    end with padding.
    """

    rank: int
    size: int

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Gather (rows, ⌈length / size⌉, …) of each rank to (rows, length, …)."""
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """Sum (rows, length, …) over the ranks, and return this rank's (rows, ⌈length / size⌉, …) of the sum.

        Padding of the last rank's part is zero.
        """
        ...

    def gather_features(self, x: Tensor) -> Tensor:
        """Gather (…, n) of each rank, the same n on all, to (size, …, n)."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks, in place, and return it."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Take the elementwise maximum of ``x`` over the ranks, in place, and return it."""
        ...

    def trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send runs of a flat ``x`` to all ranks in order, and return those received, in order of their senders.

        Args:
            sends, receives: number of elements for and from each rank.
        """
        ...

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin ``gather_features``, and return the function that waits for its result."""
        ...

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        """Begin to sum this rank's of all ranks' (size, …), and return the function that waits for the sum."""
        ...

    def begin_trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        """Begin ``trade``, and return the function that waits for its result."""
        ...

    def pass_on(self, x: Tensor, elements: int, shift: int = 1) -> Callable[[], Tensor]:
        """Begin to send a flat ``x`` to the rank ``shift`` further on, and to receive from the one ``shift`` before.

        Returns:
            A function that waits for the ``elements`` received and returns them.
        """
        ...


Wait = Callable[[], None]


def _behind(wait: Wait, received: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits, and returns what has been received."""

    def finish() -> Tensor:
        wait()
        return received

    return finish


def _nothing() -> None:
    """Wait for a message that has been received."""


def _waiting(work: dist.Work | None, x: Tensor) -> Wait:
    """Return the function that waits for a message; ``x`` lives until it has been sent."""
    if work is None:
        return _nothing
    held = [x]

    def wait() -> None:
        work.wait()
        held.clear()

    return wait


def share_of_sequence(length: int, size: int) -> int:
    """Return the number of tokens of a row on each rank, padding of the last rank included."""
    return -(-length // size)


def own_share(x: Tensor, rank: int, size: int) -> Tensor:
    """Return this rank's part of dim 1 of a whole (rows, length, …), padded with zeros."""
    share = share_of_sequence(x.shape[1], size)
    mine = x[:, rank * share : (rank + 1) * share]
    missing = share - mine.shape[1]
    return torch.cat([mine, x.new_zeros((x.shape[0], missing, *x.shape[2:]))], dim=1) if missing else mine.contiguous()


def by_rank(x: Tensor, size: int) -> Tensor:
    """Cut (rows, length, …) along dim 1 into (size, rows, ⌈length / size⌉, …), contiguous."""
    rows, length, *rest = x.shape
    share = -(-length // size)
    if share * size != length:
        x = torch.cat([x, x.new_zeros((rows, share * size - length, *rest))], dim=1)
    return x.view(rows, size, share, *rest).transpose(0, 1).contiguous()


def joined(parts: Tensor, length: int) -> Tensor:
    """Join (size, rows, share, …) to (rows, length, …)."""
    size, rows, share, *rest = parts.shape
    whole = parts.transpose(0, 1).reshape(rows, size * share, *rest)
    return whole if size * share == length else whole[:, :length]


class MessagingRanks:
    """A RankGroup that sends whole buffers; subclasses define the transport."""

    rank: int
    size: int

    def gather_into(self, parts: Tensor, x: Tensor, *, begins: bool = False) -> Wait:
        """Gather every rank's ``x`` into ``parts``, concatenated along dim 0; ``begins``: return before it is there.

        Returns:
            A function that waits; it does nothing where nothing is left to wait for.
        """
        raise NotImplementedError

    def scatter_into(self, mine: Tensor, parts: Tensor, *, begins: bool = False) -> Wait:
        """Sum the ranks' ``parts``, and write this rank's part of the sum into ``mine``.

        Args, returns: see ``gather_into``.
        """
        raise NotImplementedError

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce ``x`` over the ranks, in place."""
        raise NotImplementedError

    def trade_into(
        self, received: Tensor, x: Tensor, receives: Sequence[int], sends: Sequence[int], *, begins: bool = False
    ) -> Wait:
        """Receive every rank's run of ``x`` for this rank into ``received``; else see ``gather_into``."""
        raise NotImplementedError

    def pass_into(self, received: Tensor, x: Tensor, shift: int) -> Wait:
        """Begin to send ``x`` to the rank ``shift`` further on, and return the function that waits."""
        raise NotImplementedError

    def gather(self, x: Tensor, length: int) -> Tensor:
        return joined(self.gather_features(x), length)

    def scatter(self, x: Tensor) -> Tensor:
        return exchanged(self._scattered, x)

    def gather_features(self, x: Tensor) -> Tensor:
        return exchanged(self._gathered, x)

    def sum(self, x: Tensor) -> Tensor:
        return exchanged(self._reduced, x, dist.ReduceOp.SUM, into=x)

    def largest(self, x: Tensor) -> Tensor:
        return exchanged(self._reduced, x, dist.ReduceOp.MAX, into=x)

    def trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        return exchanged(self._traded, x, sends, receives)

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        def begin() -> Callable[[], Tensor]:
            parts = x.new_empty((self.size, *x.shape))
            return _behind(self.gather_into(parts.flatten(0, 1), x.contiguous(), begins=True), parts)

        return exchanging(begin)

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        def begin() -> Callable[[], Tensor]:
            mine = torch.empty_like(parts[0])
            return _behind(self.scatter_into(mine, parts.flatten(0, 1), begins=True), mine)

        return exchanging(begin)

    def begin_trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        def begin() -> Callable[[], Tensor]:
            received = x.new_empty(sum(receives))
            return _behind(self.trade_into(received, x.contiguous(), receives, sends, begins=True), received)

        return exchanging(begin)

    def pass_on(self, x: Tensor, elements: int, shift: int = 1) -> Callable[[], Tensor]:
        received = x.new_empty(elements)
        return _behind(self.pass_into(received, x.contiguous(), shift), received)

    def _traded(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        received = x.new_empty(sum(receives))
        self.trade_into(received, x.contiguous(), receives, sends)
        return received

    def _gathered(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        self.gather_into(parts.flatten(0, 1), x.contiguous())
        return parts

    def _scattered(self, x: Tensor) -> Tensor:
        parts = by_rank(x, self.size)
        mine = torch.empty_like(parts[0])
        self.scatter_into(mine, parts.flatten(0, 1))
        return mine

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        self.reduce(x, op)
        return x


class ProcessGroupRanks(MessagingRanks):
    """A RankGroup over a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather_into(self, parts: Tensor, x: Tensor, *, begins: bool = False) -> Wait:
        return _waiting(_all_gather(parts, x, group=self.group, async_op=begins), x)

    def scatter_into(self, mine: Tensor, parts: Tensor, *, begins: bool = False) -> Wait:
        return _waiting(_reduce_scatter(mine, parts, group=self.group, async_op=begins), parts)

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(x, op=op, group=self.group)

    def trade_into(
        self, received: Tensor, x: Tensor, receives: Sequence[int], sends: Sequence[int], *, begins: bool = False
    ) -> Wait:
        sizes = (list(receives), list(sends))
        return _waiting(dist.all_to_all_single(received, x, *sizes, group=self.group, async_op=begins), x)

    def pass_into(self, received: Tensor, x: Tensor, shift: int) -> Wait:
        to, source = (dist.get_global_rank(self.group, (self.rank + by) % self.size) for by in (shift, -shift))
        requests = [
            dist.P2POp(dist.isend, x, to, self.group),
            dist.P2POp(dist.irecv, received, source, self.group),
        ]
        works = dist.batch_isend_irecv(requests)

        def wait() -> None:
            for work in works:
                work.wait()
            del x_alive[:]

        x_alive = [x]  # held until it has been sent
        return wait


def linear_map(x: Tensor, forward: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear map to a tensor; its backward applies the transposed one to the gradient, and needs no tensors.

    A message is such a map: a gather that all ranks use differently is transposed to a sum that is scattered.
    """
    return _LinearMap.apply(x, forward, transposed)  # type: ignore[no-any-return]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transposed = transposed
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradients[0]), None, None
