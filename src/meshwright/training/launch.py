"""Start a run in this process (one rank of an external launcher) or in worker processes.

Torch-free.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

from meshwright.checkpoint.store import probe, store_of
from meshwright.core.axes import WORLD_AXES
from meshwright.core.devices import gpu_count
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.core.host import physical_cores
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool
from meshwright.distributed.process.world import (
    get_world_info,
    is_rank_zero,
    ranks_per_node,
    refuse_without_distributed,
)
from meshwright.planning.layout import Layout
from meshwright.training.config import Config
from meshwright.training.health.heartbeat import find_stall, name_of, whereabouts
from meshwright.training.health.peers import RankLost, RankStalled, read_all_records, run_folder, with_way_on
from meshwright.training.run.occupancy import latest_checkpoint
from meshwright.training.run.request import RESOLVED, completed, read_request
from meshwright.training.stopping import INTERRUPT, answered, leave_terminal

MOST_ON_CPU = 4
"""Processes that are started at most where nobody says how many."""


def launch(config: Config) -> int:
    """Run the config to its end and return the exit status.

    Under torchrun or srun this process is one rank. Otherwise it starts ``process.count`` workers (0: see
    ``usual_processes``), or trains in this process if that is one. When a worker is lost, it starts new workers that
    continue in the run's folder, at most ``process.max_restarts`` times.

    Raises:
        MeshwrightError: the config was refused, or the run failed; the text is for the user.
    """
    started = time.time()
    world = get_world_info()[2]
    count = process_count(config)
    if world in (1, ranks_per_node()) and (words := completed(config)):  # all ranks see the same files
        if is_rank_zero():
            print(words)
        return 0
    if config.checkpoint.folder and is_rank_zero():
        probe(store_of(config.checkpoint.folder), max(count, world))
    if world > 1 or (count == 1 and not config.process.max_restarts):
        return train(config, started)
    pool = WorkerPool(count, oversubscribe=bool(config.process.count))
    most, restarts = config.process.max_restarts, 0
    # in this order: a Ctrl-C while the pool is closing must not leave its folder behind
    with _Signals(pool) as signals, closing(pool):
        while True:
            try:
                pool.start()
                signals.workers_are_up()
                return pool.run(train, config, started)[0]
            except (WorkerFailed, WorkerDied) as trouble:
                if stopped := signals.explain(trouble):
                    raise stopped from None
                failure, folder = _words(trouble, pool.folder), run_folder(pool.folder)
                if signals.first or restarts >= most or not is_worth_a_restart(trouble):
                    if isinstance(failure, LostWorker | RankLost | RankStalled):
                        failure = type(failure)(with_way_on(str(failure), folder))
                    raise failure from None
                restarts, started = restarts + 1, time.time()
                from_where = (latest_checkpoint(folder) or "step 0: it has no checkpoint yet") if folder else ""
                where = f"continuing {folder} from {from_where}" if folder else "beginning again"
                first_line = next(iter(str(failure).strip().splitlines()[-1:]), "").rstrip(".")
                print(f"meshwright: restart {restarts} of {most}: {first_line}; {where}", file=sys.stderr, flush=True)
                config = replace(config, run=str(folder) if folder else config.run)


def train(config: Config, started: float) -> int:
    """Run one rank's part of the run."""
    refuse_without_distributed()
    from meshwright.training.trainer import Trainer

    return Trainer(config, started=started).run()


def process_count(config: Config) -> int:
    """Return the number of ranks: those of an external launcher, or the processes to start on this host.

    Raises:
        ConfigError: the layout does not fit that number; the text names the key that the run keeps, if that is why.
    """
    layout, world = config.layout, get_world_info()[2]
    count = world if world > 1 else config.process.count
    count = count or usual_processes(layout)
    try:
        layout.resolve(count, ranks_per_node=(ranks_per_node() if world > 1 else count) or None)
    except ConfigError as error:
        raise ConfigError(f"{error}{_way_on(config, count, world)}") from None
    return count


def usual_processes(layout: Layout) -> int:
    """Return the processes to start where nobody says how many: as many as the layout has ranks, else one per GPU, else
    a power of two for the physical cores, of which the layout's own axes take their part.
    """
    if layout.is_resolved:
        return layout.world
    fixed = math.prod(size for axis in WORLD_AXES if (size := layout.size(axis)) > 0)
    cores = 1 << (min(MOST_ON_CPU, physical_cores()).bit_length() - 1)
    return gpu_count() or fixed * max(1, cores // fixed)


def _way_on(config: Config, count: int, world: int) -> str:
    """Say which key to change where one that is set, or that the run keeps, is why the layout does not fit."""
    layout, kept = config.layout, read_request(Path(config.run).expanduser(), RESOLVED) if config.run else None
    fixed = math.prod(size for axis in WORLD_AXES if (size := layout.size(axis)) > 0)
    fitting = fixed if layout.is_resolved else max(fixed, count // max(fixed, 1) * fixed)
    given = config.process.count if world == 1 else 0
    if given and (kept is None or kept.process.count == given):
        how = f"is kept in the run {config.run}: add" if kept else "is set: make it"
        also = " (0: as many as the layout has ranks)" if layout.is_resolved else ""
        return f" process.count = {given} {how} --process.count={fitting}{also}." if _fits(layout, fitting) else ""
    if kept is None:
        return ""
    sizes = {axis: n for axis, n in vars(kept.layout).items() if n > 1 and n == getattr(layout, axis)}
    held = [f"layout.{axis} = {n}" for axis, n in sizes.items()]
    began = f" (it keeps process.count = {kept.process.count} too)" if kept.process.count else ""
    here = "leave --process.count out" if given else f"add --process.count={fitting}"
    other = here if world == 1 else f"start {fitting}"
    left: dict[str, int] = {"dp_shard": -1}
    for other_sizes in (left, {"dp_replicate": 1} | left, dict.fromkeys(sizes, 1) | left):
        if held and _fits(replace(layout, **other_sizes), count):
            flags = " ".join(f"--layout.{axis}={size}" for axis, size in other_sizes.items())
            return (
                f" {', '.join(held)} {'is' if len(held) == 1 else 'are'} kept in the run {config.run}{began}: add"
                f" {flags} to go on with {count} processes, or {other}."
            )
    return ""


def _fits(layout: Layout, count: int) -> bool:
    try:
        return bool(layout.resolve(count, ranks_per_node=count))
    except ConfigError:
        return False


def is_worth_a_restart(trouble: WorkerFailed | WorkerDied) -> bool:
    """Return whether a restart may help: the ranks would raise a wrong config, or an unreadable checkpoint, again."""
    error = trouble.error if isinstance(trouble, WorkerFailed) else None
    return isinstance(error, RankLost | RankStalled) or not isinstance(error, MeshwrightError | KeyboardInterrupt)


def _words(trouble: WorkerFailed | WorkerDied, place: Path) -> MeshwrightError | KeyboardInterrupt:
    """Return the error for a failed worker: our own errors unchanged, any other with its traceback.

    For a worker that died, the error names the step and the module.
    """
    if isinstance(trouble, WorkerFailed):
        return for_the_user(trouble)
    records = read_all_records(place)
    record = records.get(trouble.rank)
    if record is None or record.pid != trouble.pid:
        return trouble
    stall = find_stall(records, time.time()) if trouble.exit_code == -signal.SIGABRT else None  # NCCL's watchdog
    why = f" ({stall.sentence})" if stall else ""
    return LostWorker(f"{name_of(record)} {trouble.how} {whereabouts(record)}{why}; the other ranks were stopped")


class LostWorker(MeshwrightError):
    """An error for a worker process that ended in the middle of the run; the message names its place."""


def for_the_user(failure: WorkerFailed) -> MeshwrightError | KeyboardInterrupt:
    if isinstance(failure.error, ConfigError | MeshwrightError | KeyboardInterrupt):
        if os.environ.get("MESHWRIGHT_DEBUG"):
            print(failure, file=sys.stderr)
        return failure.error
    return failure


class Stopped(MeshwrightError):
    """An error for a signal that arrived before the workers could handle it; the exit status is 128 + its number."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name} before a step was under way; nothing was written")
        self.exit_status = 128 + number


class _Signals:
    """Forwards signals to the workers, including the Ctrl-C that a terminal sends to them anyway.

    A third Ctrl-C ends the run at once. Before workers exist, the first signal ends the command.
    """

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.reach_workers = False
        self.first = self.interrupts = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._answer) for number in answered()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def workers_are_up(self) -> None:
        """Leave signals to the workers from now on.

        Raises Stopped if a signal arrived while the workers were being restarted.
        """
        self.reach_workers = True
        if self.first:
            raise Stopped(self.first)

    def explain(self, trouble: WorkerFailed | WorkerDied) -> BaseException | None:
        """Return the error to raise if a signal was the cause, else None: a second Ctrl-C interrupts any work, and the
        first signal kills a worker that has no handlers yet.
        """
        if self.interrupts > 1:
            return KeyboardInterrupt()
        died_of_it = isinstance(trouble, WorkerDied) and trouble.exit_code in (-self.first, -INTERRUPT, 0, 1)
        return Stopped(self.first) if self.first and died_of_it else None

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        leave_terminal(number)
        if not self.reach_workers:
            raise Stopped(number)
        if number != signal.SIGINT:
            self.pool.signal_all(number)
            return
        self.interrupts += 1
        if self.interrupts > 2:
            raise KeyboardInterrupt
        if self.interrupts == 1:
            self.pool.signal_all(INTERRUPT)
