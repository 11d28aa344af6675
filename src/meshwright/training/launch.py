"""Starting a run: in this process when a launcher made it one of several, else over worker processes of this host. Torch-free."""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from contextlib import closing
from types import FrameType

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.distributed.local import WorkerDied, WorkerFailed, WorkerPool
from meshwright.distributed.world import get_world_info

from .config import Config

CPU_PROCESSES = 4


def launch(config: Config) -> int:
    """Run the config to its end and return the exit status.

    Under torchrun or srun this process is one rank. Otherwise it starts ``process.count`` workers (0: what the layout asks
    for, else one per GPU, else four), or trains right here when that is one.

    Raises:
        MeshwrightError: refused, or failed; the text is for the user.
    """
    started = time.time()
    world = get_world_info()[2]
    count = 1 if world > 1 else process_count(config)
    if count == 1:
        return train(config, started)
    with closing(WorkerPool(count)) as pool, _Signals(pool) as signals:
        try:
            pool.start()
            signals.reach_workers = True
            return pool.run(train, config, started)[0]
        except (WorkerFailed, WorkerDied) as trouble:
            raise signals.explain(trouble) or _for_the_user(trouble) from None


def train(config: Config, started: float) -> int:
    """One rank's part of the run."""
    from .trainer import Trainer

    return Trainer(config, started=started).run()


def process_count(config: Config) -> int:
    """How many processes to start here.

    Raises:
        ConfigError: the layout cannot be spread over that many.
    """
    layout, count = config.layout, config.process.count
    if not count:
        count = layout.world if layout.is_resolved else gpu_count() or CPU_PROCESSES
    layout.resolve(count, ranks_per_node=count)
    return count


def gpu_count() -> int:
    """GPUs of this host that this process may use, found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _for_the_user(failure: WorkerFailed | WorkerDied) -> MeshwrightError | KeyboardInterrupt:
    """What the worker meant to say: our own errors as they are, anything else with its traceback."""
    error = failure.error if isinstance(failure, WorkerFailed) else None
    if isinstance(error, ConfigError | MeshwrightError | KeyboardInterrupt):
        if os.environ.get("MESHWRIGHT_DEBUG"):
            print(failure, file=sys.stderr)
        return error
    return failure


class Stopped(MeshwrightError):
    """A signal came before the workers could note it; the exit status is 128 + its number."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name} before a step was under way; nothing was written")
        self.exit_status = 128 + number


class _Signals:
    """Lets the workers answer signals: Ctrl-C reaches them by itself, TERM and USR1 are passed on; a third Ctrl-C ends all at once.

    Before there are workers the first signal ends the command.
    """

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.reach_workers = False
        self.first = self.interrupts = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._answer) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def explain(self, trouble: WorkerFailed | WorkerDied) -> BaseException | None:
        """What to raise where a signal was the cause: a second Ctrl-C breaks off whatever is done, and a worker that has not yet
        begun to take note of signals dies of the first."""
        if self.interrupts > 1:
            return KeyboardInterrupt()
        died_of_it = isinstance(trouble, WorkerDied) and trouble.exit_code in (-self.first, 0, 1)
        return Stopped(self.first) if self.first and died_of_it else None

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        if not self.reach_workers:
            raise Stopped(number)
        if number != signal.SIGINT:
            self.pool.signal_all(number)
            return
        self.interrupts += 1
        if self.interrupts > 2:
            raise KeyboardInterrupt
