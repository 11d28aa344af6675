"""Run the ranks of a rehearsal as threads: a small copy runs the real model's code, and messages stay in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .ranks import by_rank, joined

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


class Thread:
    """A RankGroup whose ranks are threads."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.size = board, rank, board.size

    def gather(self, x: Tensor, length: int) -> Tensor:
        return joined(self.board.all(self.rank, x), length)

    def scatter(self, x: Tensor) -> Tensor:
        return self.board.all(self.rank, by_rank(x, self.size), lambda laid: laid[self.rank]).sum(0)

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

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        parts = self.gather_features(x)
        return lambda: parts

    def begin_scatter(self, parts: Tensor) -> Callable[[], Tensor]:
        mine = self.board.all(self.rank, parts, lambda laid: laid[self.rank]).sum(0)
        return lambda: mine

    def begin_trade(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        received = self.trade(x, sends, receives)
        return lambda: received

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
