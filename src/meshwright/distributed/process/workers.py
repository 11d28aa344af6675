"""Keep worker processes of one host alive between jobs, with a parent free of torch.

Workers are forked from a server that has imported torch already (so four start in a fraction of a second), and from a
parent that never ran a multi-threaded kernel (so OpenMP survives the fork). Each job is a function that every rank
runs; the ranks meet in a file store of the job's own, so that no port can clash.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import math
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.core.host import GLOO, LOOPBACK, refuse_too_many

from .world import STORE, refuse_without_distributed

PRELOAD = "meshwright.distributed.process.preload"


class WorkerDied(MeshwrightError):
    """A worker process ended in the middle of a job; the others were stopped. ``stacks``: where it was, if known."""

    def __init__(self, rank: int, exit_code: int | None, pid: int = 0, stacks: str = ""):
        how = (
            f"was killed by {signal.Signals(-exit_code).name}"
            if exit_code and exit_code < 0
            else f"exited with status {exit_code}"
        )
        super().__init__(f"rank {rank} {how} in the middle of the job; the other ranks were stopped{stacks}")
        self.rank, self.exit_code, self.pid, self.how = rank, exit_code, pid, how


class WorkerFailed(MeshwrightError):
    """A worker raised; the text is its traceback, and ``error`` is the exception if it could be pickled.

    ``is_echo``: a collective that broke because another rank was in trouble first.
    """

    def __init__(self, rank: int, text: str, error: BaseException | None, is_echo: bool = False):
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank, self.error, self.is_echo = rank, error, is_echo


class WorkerTimeout(MeshwrightError):
    """A job took longer than its limit; all workers were stopped."""


class WorkerPool:
    """A pool of ``size`` worker processes for jobs; after a death or a timeout, the next job replaces them.

    Args:
        threads: intra-op threads per worker; 0: an even share of the cores.
        method: "fork" makes workers from this process itself, which then has imported torch and has no threads.
        oversubscribe: start them however few cores and little memory there are.

    Raises:
        ConfigError: this host does not carry so many, and ``oversubscribe`` is not set.

    Attributes:
        folder: a temporary folder that is removed with the pool; workers find it by ``meeting_place``.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 0,
        method: Literal["forkserver", "fork"] = "forkserver",
        oversubscribe: bool = False,
    ):
        if not oversubscribe:
            refuse_too_many(size)
        self.size = size
        self.threads = threads or max(1, (os.cpu_count() or 1) // size)
        self._context: Any = mp.get_context(method)
        # the fork server listens in /tmp if TMPDIR is deep: a Unix socket path has about 100 characters at most
        config = mp.current_process()._config  # type: ignore[attr-defined]
        if len(tempfile.gettempdir()) > 60 and "tempdir" not in config:
            config["tempdir"] = tempfile.mkdtemp(prefix="meshwright-", dir="/tmp")
            atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
        self._context.set_forkserver_preload([PRELOAD])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._jobs = itertools.count()
        self.folder = Path(tempfile.mkdtemp(prefix="meshwright-"))

    def start(self) -> None:
        """Start the workers that are missing (``run`` does so too)."""
        if self._processes and all(p.is_alive() for p in self._processes):
            return
        self._stop_workers()
        for rank in range(self.size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, rank, self.threads, self.folder), daemon=True, name=f"meshwright-rank{rank}"
            )
            # keeps the fork server (python -c) from importing out of the current folder, which is not trusted
            with with_variables({"PYTHONSAFEPATH": "1"}):
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 … world-1 at once and return their results in rank order.

        Raises:
            WorkerFailed, WorkerDied, WorkerTimeout: a rank raised, ended, or the job exceeded ``timeout`` seconds.
                Among several ranks' errors the cause is raised, not its consequences on the others.
        """
        world = self.size if world is None else world
        if not 1 <= world <= self.size:
            raise ConfigError(
                f"a job for {world} ranks does not fit a pool of {self.size} workers: give it 1 to {self.size}"
            )
        self.start()
        store = str(self.folder / f"job{next(self._jobs)}")
        job = (list(sys.path), store, world, pickle.dumps((function, args)))
        try:
            for pipe in self._pipes[:world]:
                with suppress(BrokenPipeError, ConnectionError):  # a worker that died just now: _collect sees it
                    pipe.send(job)
            return self._collect(world, timeout)
        except BaseException:
            self._stop_workers()
            raise
        finally:
            with suppress(OSError):
                os.unlink(store)

    def _collect(self, world: int, timeout: float | None) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, WorkerDied | WorkerFailed] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(results) + len(problems) < world:
            open_ranks = [rank for rank in range(world) if rank not in results and rank not in problems]
            watched: dict[Any, int] = {self._pipes[rank]: rank for rank in open_ranks}
            watched |= {self._processes[rank].sentinel: rank for rank in open_ranks}
            ready = wait(list(watched), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {watched[item] for item in ready}:
                reply = None
                if self._pipes[rank].poll():
                    with suppress(EOFError, ConnectionError):
                        reply = pickle.loads(self._pipes[rank].recv_bytes())
                if reply is None:
                    process = self._processes[rank]
                    process.join(5)
                    problems[rank] = WorkerDied(rank, process.exitcode, process.pid, self._stacks(rank))
                elif reply[0]:
                    results[rank] = reply[1]
                else:
                    text, pickled, is_echo = reply[1]
                    error = None
                    with suppress(Exception):
                        error = None if pickled is None else pickle.loads(pickled)
                    problems[rank] = WorkerFailed(rank, text, error, is_echo)
            if problems:
                # the peers of a failed rank hang in their collectives; the cause may come after its echoes, but soon
                patience = PATIENCE_SEC[min(_distance(problem) for problem in problems.values())]
                deadline = min(math.inf if deadline is None else deadline, time.monotonic() + patience)
        if problems:
            raise min(problems.values(), key=lambda problem: (_distance(problem), problem.rank))
        if len(results) < world:
            missing = sorted(set(range(world)) - set(results))
            for rank in missing:
                os.kill(self._processes[rank].pid, signal.SIGQUIT)
            time.sleep(0.5)
            told = "".join(f"\nrank {rank}:{self._stacks(rank)}" for rank in missing)
            raise WorkerTimeout(f"the job did not end within {timeout} s on ranks {missing}, and was stopped:{told}")
        return [results[rank] for rank in range(world)]

    def _stacks(self, rank: int) -> str:
        file = self.folder / f"stacks{rank}"
        return f"\n{text}" if file.exists() and (text := file.read_text()) else ""

    def signal_all(self, number: int) -> None:
        """Send a signal to every worker."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """Stop the workers and remove their files."""
        self._stop_workers()
        shutil.rmtree(self.folder, ignore_errors=True)

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


PATIENCE_SEC = (0.0, 0.5, 2.0, 5.0)
"""Seconds to wait for errors of other ranks, by the distance of the nearest known cause."""


def _distance(problem: WorkerDied | WorkerFailed) -> int:
    """Rate an error's distance from its cause: a death is one (but gloo aborts if a peer died), an echo is none."""
    if isinstance(problem, WorkerDied):
        return 2 if problem.exit_code == -signal.SIGABRT else 0
    return 3 if problem.is_echo else 1


def _serve(pipe: Connection, rank: int, threads: int, folder: Path) -> None:
    """Serve jobs in a worker: wait for one, run it, report; end when the parent is gone.

    SIGQUIT and signals of fatal errors, such as SIGSEGV, write its stacks.
    """
    import torch

    stacks = (folder / f"stacks{rank}").open("w")
    faulthandler.register(signal.SIGQUIT, stacks)
    faulthandler.enable(stacks)
    torch.set_num_threads(threads)
    os.environ.setdefault(GLOO, LOOPBACK)
    if (parent := mp.parent_process()) is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)  # a killed parent's workers would stay, perhaps forever in a collective

        threading.Thread(target=end_with_parent, daemon=True).start()
    gc.freeze()  # imported objects stay, so collections between jobs need not scan them
    while True:
        try:
            path, store, world, job = pipe.recv()
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, STORE: store}
        with with_variables(own), suppress(BrokenPipeError, ConnectionError):
            _perform(path, job, pipe)


def _perform(path: list[str], job: bytes, pipe: Connection) -> None:
    """Run a job and report; report failures before the group closes, which takes a moment and fails peers too."""
    try:
        refuse_without_distributed()
    except MeshwrightError as error:
        pipe.send_bytes(_pickled(error))
        return
    from meshwright.distributed.setup import destroy_distributed

    try:
        sys.path[:] = path
        function, args = pickle.loads(job)
        reply = pickle.dumps((True, function(*args)))
    except BaseException as error:  # noqa: BLE001  (everything must reach the parent, or it waits for ever)
        pipe.send_bytes(_pickled(error))
        destroy_distributed(patience_sec=5)
    else:
        destroy_distributed(patience_sec=5)
        pipe.send_bytes(reply)


def _pickled(error: BaseException) -> bytes:
    try:
        carried = pickle.dumps(error)
    except Exception:  # noqa: BLE001  (such an error is sent as its text)
        carried = None
    return pickle.dumps((False, ("".join(traceback.format_exception(error)), carried, is_broken_collective(error))))


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an error reports a failed collective or message, whose cause lies on another rank."""
    if getattr(error, "is_echo", False):
        return True
    words = str(error).lower()
    names_transport = any(word in words for word in ("gloo", "connection", "nccl", "timed out"))
    return isinstance(error, RuntimeError) and not isinstance(error, MeshwrightError) and names_transport


@contextmanager
def with_variables(values: Mapping[str, object]) -> Iterator[None]:
    """Set environment variables, or unset those of the value None, and restore them on exit."""

    def change(wanted: Mapping[str, object]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    before = {name: os.environ.get(name) for name in values}
    change(values)
    try:
        yield
    finally:
        change(before)


def meeting_place() -> Path | None:
    """Return the temporary folder of the pool that this process works for; None outside a pool."""
    store = os.environ.get(STORE)
    return Path(store).parent if store else None
