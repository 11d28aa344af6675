"""Exchange tensors among the ranks of one axis: over a process group, or among threads of a rehearsal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

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
        return joined(self.gather_features(x), length)

    def scatter(self, x: Tensor) -> Tensor:
        """Sum (rows, length, …) over the ranks, and return this rank's (rows, ⌈length / size⌉, …) of the sum.

        Padding of the last rank's part is zero.
        """
        return self.begin_scatter(by_rank(x, self.size))()

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
        """Send runs of a flat ``x`` to all ranks in order, and return those received, in order of their senders."""
        ...

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin ``gather_features``, and return the function that waits for its result."""
        parts = self.gather_features(x)
        return lambda: parts

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        """Begin to sum this rank's of all ranks' (size, …), and return the function that waits for the sum."""
        ...

    def begin_trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        """Begin ``trade``, and return the function that waits for its result."""
        received = self.trade(x, sends, receives)
        return lambda: received

    def pass_on(self, x: Tensor, elements: int, shift: int = 1) -> Callable[[], Tensor]:
        """Begin to send a flat ``x`` ``shift`` ranks on; return what waits for the ``elements`` from as many before."""
        ...


Sending = tuple[Tensor, Tensor, dist.Work | None]
"""The tensor that receives, the one that is sent, and, of a message that only begins, what waits for its end."""


def _waiting(received: Tensor, sent: Tensor, *works: dist.Work | None) -> Callable[[], Tensor]:
    """Return a function that waits for messages, and returns what has been received; ``sent`` lives until then."""
    held = [sent]

    def wait() -> Tensor:
        for work in works:
            if work is not None:
                work.wait()
        held.clear()
        return received

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


class ProcessGroupRanks(RankGroup):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)

    def scatter(self, x: Tensor) -> Tensor:
        return exchanged(lambda: self._scatter(by_rank(x, self.size))[0])

    def gather_features(self, x: Tensor) -> Tensor:
        return exchanged(lambda: self._gather(x)[0])

    def sum(self, x: Tensor) -> Tensor:
        return exchanged(self._reduced, x, dist.ReduceOp.SUM, into=x)

    def largest(self, x: Tensor) -> Tensor:
        return exchanged(self._reduced, x, dist.ReduceOp.MAX, into=x)

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(x, op=op, group=self.group)
        return x

    def trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        return exchanged(lambda: self._trade(x, sends, receives)[0])

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        return exchanging(lambda: _waiting(*self._gather(x, begins=True)))

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        return exchanging(lambda: _waiting(*self._scatter(parts, begins=True)))

    def begin_trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        return exchanging(lambda: _waiting(*self._trade(x, sends, receives, begins=True)))

    def _gather(self, x: Tensor, *, begins: bool = False) -> Sending:
        parts, mine = x.new_empty((self.size, *x.shape)), x.contiguous()
        return parts, mine, _all_gather(parts.flatten(0, 1), mine, group=self.group, async_op=begins)

    def _scatter(self, parts: Tensor, *, begins: bool = False) -> Sending:
        mine, flat = torch.empty_like(parts[0]), parts.flatten(0, 1)
        return mine, flat, _reduce_scatter(mine, flat, group=self.group, async_op=begins)

    def _trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int], *, begins: bool = False) -> Sending:
        received, mine, sizes = x.new_empty(sum(receives)), x.contiguous(), (list(receives), list(sends))
        work = dist.all_to_all_single(received, mine, *sizes, group=self.group, async_op=begins)
        return received, mine, work

    def pass_on(self, x: Tensor, elements: int, shift: int = 1) -> Callable[[], Tensor]:
        received, mine = x.new_empty(elements), x.contiguous()
        to, source = self._ranks[(self.rank + shift) % self.size], self._ranks[(self.rank - shift) % self.size]
        sides = [dist.P2POp(dist.isend, mine, to, self.group), dist.P2POp(dist.irecv, received, source, self.group)]
        return _waiting(received, mine, *dist.batch_isend_irecv(sides))


# --- run the ranks of a rehearsal as threads: a small copy runs the real model's code, and messages stay in memory

Result = TypeVar("Result")
PATIENCE_SEC = 60.0


class Board:
    """A meeting point of threads: each lays down a tensor, and reads the tensors of all.

    One thread computes at a time: threads that compete for the interpreter take twice as long together.
    """

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SEC)
        self.laid = [[torch.empty(0)] * size for _ in range(2)]
        self.messages = [0] * size
        self.turn = threading.Lock()

    def meet(self) -> None:
        """Let the other threads compute until all are here."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def all(self, rank: int, x: Tensor, read: Callable[[Tensor], Tensor] = lambda laid: laid) -> Tensor:
        """Return (ranks, ...): ``read`` of every rank's tensor, copied."""
        return torch.stack([read(tensor) for tensor in self.lay(rank, x)])

    def lay(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return the tensors that all ranks lay down; read them before this rank's next message but one."""
        laid = self.laid[self.messages[rank] % 2]
        self.messages[rank] += 1
        laid[rank] = x.clone()  # its rank may write into it before others read it
        self.meet()  # after two more messages all have read it: a rank reads before it meets again
        return laid


class Thread(RankGroup):
    """One of the threads that are ranks."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.size = board, rank, board.size

    def gather_features(self, x: Tensor) -> Tensor:
        return self.board.all(self.rank, x)

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self.board.all(self.rank, x).sum(0))

    def largest(self, x: Tensor) -> Tensor:
        return x.copy_(self.board.all(self.rank, x).amax(0))

    def trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        laid = self.board.lay(self.rank, torch.tensor(sends))
        before = [int(counts[: self.rank].sum()) for counts in laid]
        laid = self.board.lay(self.rank, x)
        runs = zip(laid, before, receives, strict=True)
        return torch.cat([flat[start : start + count] for flat, start, count in runs])

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        mine = self.board.all(self.rank, parts, lambda laid: laid[self.rank]).sum(0)
        return lambda: mine

    def pass_on(self, x: Tensor, elements: int, shift: int = 1) -> Callable[[], Tensor]:
        received = self.board.lay(self.rank, x)[(self.rank - shift) % self.size].clone()
        assert len(received) == elements
        return lambda: received


def on_threads(size: int, job: Callable[[Thread], Result]) -> list[Result]:
    """Run ``job`` on each of ``size`` threads, and return the results; raise the first error that a thread raised."""
    board = Board(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with board.turn:
                results[rank] = job(Thread(board, rank))
        except BaseException as error:  # noqa: BLE001  (raised below)
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


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
