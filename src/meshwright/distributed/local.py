"""Worker processes of one host, kept alive between jobs. Torch-free in the parent.

Workers are forked from a server that has imported torch already (so four start in a fraction of a second), and from a parent
that never ran a multi-threaded kernel (so OpenMP survives the fork). Each job is a function that every rank runs; the ranks
meet in a file store of the job's own, so that no port can clash.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from meshwright.core.errors import MeshwrightError

PRELOAD = "meshwright.distributed.preload"


class WorkerDied(MeshwrightError):
    """A worker process ended in the middle of a job; the others were stopped."""

    def __init__(self, rank: int, exit_code: int | None):
        how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code and exit_code < 0 else f"exited with status {exit_code}"
        super().__init__(f"rank {rank} {how} in the middle of the job; the other ranks were stopped")
        self.rank, self.exit_code = rank, exit_code


class WorkerFailed(MeshwrightError):
    """A worker raised; the text is its traceback. ``error`` is the exception where it could travel."""

    def __init__(self, rank: int, text: str, error: BaseException | None):
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank, self.error = rank, error


class WorkerTimeout(MeshwrightError):
    """A job took longer than its limit; all workers were stopped."""


class WorkerPool:
    """``size`` worker processes. ``run`` gives them a job; after a death or a timeout they are replaced at the next job.

    Args:
        threads: intra-op threads per worker; 0: the cores shared out evenly.
    """

    def __init__(self, size: int, *, threads: int = 0):
        self.size = size
        self.threads = threads or max(1, (os.cpu_count() or 1) // size)
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOAD])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._jobs = itertools.count()
        self._folder = tempfile.mkdtemp(prefix="meshwright-")

    def start(self) -> None:
        """Start the workers that are not there yet (``run`` does it too)."""
        if self._processes and all(p.is_alive() for p in self._processes):
            return
        self._stop_workers()
        for rank in range(self.size):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, rank, self.threads), daemon=True, name=f"meshwright-rank{rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *args: Any, world: int | None = None, timeout: float | None = None) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 … world-1 at once and return their results in rank order.

        Raises:
            WorkerFailed, WorkerDied, WorkerTimeout: a rank raised, ended, or the job took more than ``timeout`` seconds.
        """
        world = world or self.size
        self.start()
        store = os.path.join(self._folder, f"job{next(self._jobs)}")
        job = (list(sys.path), store, world, pickle.dumps((function, args)))
        for rank in range(world):
            self._pipes[rank].send(job)
        try:
            return self._collect(world, timeout)
        except BaseException:
            self._stop_workers()
            raise

    def _collect(self, world: int, timeout: float | None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[WorkerFailed] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(results) + len(failures) < world:
            open_ranks = [rank for rank in range(world) if rank not in results and rank not in {f.rank for f in failures}]
            watched: dict[Any, int] = {self._pipes[rank]: rank for rank in open_ranks}
            watched |= {self._processes[rank].sentinel: rank for rank in open_ranks}
            # after a first failure the peers hang in their collectives: they get a moment to fail too, not more
            left = 5.0 if failures else None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(watched), left)
            if not ready:
                break
            for item in ready:
                self._take(item, watched[item], results, failures)
        if failures:
            self._stop_workers() if len(results) + len(failures) < world else None
            raise min(failures, key=lambda f: (f.is_echo, f.rank))
        if len(results) < world:
            missing = sorted(set(range(world)) - set(results))
            raise WorkerTimeout(f"the job did not end within {timeout} s on ranks {missing}; all workers were stopped")
        return [results[rank] for rank in range(world)]

    def _take(self, item: Any, rank: int, results: dict[int, Any], failures: list[Any]) -> None:
        if rank in results or any(f.rank == rank for f in failures):
            return
        if isinstance(item, Connection) or self._pipes[rank].poll():
            with suppress(EOFError, ConnectionError):
                fine, payload = pickle.loads(self._pipes[rank].recv_bytes())
                if fine:
                    results[rank] = payload
                else:
                    failures.append(_failure(rank, *payload))
                return
        process = self._processes[rank]
        process.join(5)
        raise WorkerDied(rank, process.exitcode)

    def signal_all(self, number: int) -> None:
        """Send a signal to every worker."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """Stop the workers and remove what they left."""
        self._stop_workers()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_workers(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failure(rank: int, text: str, pickled: bytes | None, is_echo: bool) -> WorkerFailed:
    error = None
    if pickled is not None:
        with suppress(Exception):
            error = pickle.loads(pickled)
    failure = WorkerFailed(rank, text, error)
    failure.is_echo = is_echo  # type: ignore[attr-defined]
    return failure


def _serve(pipe: Connection, rank: int, threads: int) -> None:
    """A worker's life: wait for a job, run it, report; end when the parent is gone."""
    import torch

    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    while True:
        try:
            path, store, world, job = pipe.recv()
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return
        with _as_rank(rank, world, store):
            reply = _perform(path, job)
        with suppress(BrokenPipeError, ConnectionError):
            pipe.send_bytes(reply)


def _perform(path: list[str], job: bytes) -> bytes:
    from .setup import destroy_distributed

    try:
        sys.path[:] = path
        function, args = pickle.loads(job)
        return pickle.dumps((True, function(*args)))
    except BaseException as error:  # noqa: BLE001  (everything must reach the parent, or it waits for ever)
        text = traceback.format_exc()
        try:
            carried = pickle.dumps(error)
        except Exception:  # noqa: BLE001  (what cannot be pickled travels as its text)
            carried = None
        # a collective that broke because a peer failed first is an echo of that failure
        is_echo = "gloo" in text.lower() or "connection closed" in text.lower()
        return pickle.dumps((False, (text, carried, is_echo)))
    finally:
        destroy_distributed(patience_sec=5)


@contextmanager
def _as_rank(rank: int, world: int, store: str) -> Iterator[None]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, STORE: store}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


STORE = "MESHWRIGHT_FILE_STORE"
"""Path of the file through which the workers of one job on one host find each other (set by the pool, read by setup)."""
