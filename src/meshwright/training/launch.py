"""Starting a run: in this process when a launcher made it one of several, else over worker processes of this host. Torch-free."""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.distributed.local import WorkerFailed, WorkerPool
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
    with WorkerPool(count) as pool, _forwarded_signals(pool):
        try:
            return pool.run(train, config, started)[0]
        except WorkerFailed as failure:
            raise _for_the_user(failure) from None


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


def _for_the_user(failure: WorkerFailed) -> MeshwrightError | KeyboardInterrupt:
    """What the worker meant to say: our own errors as they are, anything else with its traceback."""
    error = failure.error
    if isinstance(error, ConfigError | MeshwrightError | KeyboardInterrupt):
        if os.environ.get("MESHWRIGHT_DEBUG"):
            print(failure, file=sys.stderr)
        return error
    return failure


@contextmanager
def _forwarded_signals(pool: WorkerPool) -> Iterator[None]:
    """Let the workers answer signals: Ctrl-C reaches them by itself, TERM and USR1 are passed on; a third Ctrl-C ends all at once."""
    interrupts = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 2:
            raise KeyboardInterrupt

    def forward(number: int, frame: FrameType | None) -> None:
        pool.signal_all(number)

    handlers: dict[int, Callable] = {signal.SIGINT: on_interrupt, signal.SIGTERM: forward, signal.SIGUSR1: forward}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
