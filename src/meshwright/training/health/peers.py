"""Explain from other ranks' heartbeats why a collective failed or hangs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from meshwright.core.devices import device_in_use, is_accelerator
from meshwright.core.errors import MeshwrightError, command
from meshwright.core.files import replace_text
from meshwright.distributed.process.workers import is_broken_collective, meeting_place
from meshwright.distributed.process.world import get_world_info
from meshwright.training.health.heartbeat import (
    FOLDER,
    Heartbeat,
    Record,
    find_stall,
    first_lost,
    name_of,
    process_state,
    read_records,
    whereabouts,
    write_stacks,
)
from meshwright.training.run.occupancy import latest_checkpoint

RUN = "run"
"""File in the launcher's temporary folder that names the run's folder."""
PATIENCE_SEC = 4.0
"""Time to search for the rank that broke a collective: its process may take a moment to end."""


class RankLost(MeshwrightError):
    """An error for a collective that failed because another rank ended; the text names rank, place and step."""

    is_echo = True


class RankStalled(MeshwrightError):
    """An error for a collective that reached its time limit; the text names the waiting and the missing ranks."""


class Peers:
    """Watches the collectives of one rank.

    Args:
        heartbeat: this rank's heartbeat; its folder also holds those of the other ranks.
        limit_sec: the time limit of a collective before the first step.
    """

    def __init__(self, heartbeat: Heartbeat, limit_sec: float):
        self.heartbeat, self.limit_sec, self.limit = heartbeat, limit_sec, "startup_timeout_sec"
        self.stall = ""
        self._seen: tuple[str, int] | None = None
        heartbeat.watch = self._watch

    def begin_steps(self, limit_sec: float) -> None:
        """Set the time limit of collectives from the first step on."""
        self.limit_sec, self.limit = limit_sec, "step_timeout_sec"

    def _watch(self) -> None:
        """Diagnose a stall shortly before the time limit, while all ranks still wait in their collectives."""
        collective = self.heartbeat.collective
        if collective is None or (self.heartbeat.folder is None):
            return
        warning = self.limit_sec - min(max(2.5, 0.05 * self.limit_sec), self.limit_sec / 2)
        here = (collective["group"], collective["number"])
        if time.time() - collective["since"] < warning or here == self._seen:
            return
        self._seen = here
        self.stall = self._diagnosis()
        if self.stall and is_accelerator(device_in_use()):
            # a watchdog like NCCL's may end the process without an exception
            print(f"meshwright: {self.stall}", file=sys.stderr, flush=True)

    def _diagnosis(self) -> str:
        if (folder := self.heartbeat.folder) is None or not (stall := find_stall(read_records(folder), time.time())):
            return ""
        if self.heartbeat.rank != stall.waiting[0].rank:
            return stall.sentence
        path = write_stacks(folder.parent if folder.name == FOLDER else folder, stall)
        return stall.sentence + (f". Stacks: {path}" if path else "")

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise: a failed collective is explained by the rank that caused it; others are
        unchanged.
        """
        if not is_broken_collective(error):
            return error
        if "timed out" in str(error).lower() or self.stall:
            message = self.stall or self._diagnosis() or f"a collective did not end, {self._here()} ({error})"
            return RankStalled(f"{message}. The limit is process.{self.limit} = {self.limit_sec:.0f}.")
        me, folder, lost, deadline = self.heartbeat.rank, self.heartbeat.folder, None, time.monotonic() + PATIENCE_SEC
        while folder is not None and lost is None and time.monotonic() < deadline:
            lost = first_lost(read_records(folder), me)
            if lost is None:
                time.sleep(0.05)
        if lost is None:
            return RankLost(f"rank {me}, {self._here()}, lost the connection to another rank ({error})")
        how = f"failed {whereabouts(lost)}: {lost.last_words}"
        how = how if lost.last_words else f"ended without a word {whereabouts(lost)}"
        is_last_word = meeting_place() is None and folder is not None and folder.name == FOLDER  # else our launcher's
        message = f"{name_of(lost)} {how}; rank {me} was {self._here()} and stops too"
        return RankLost(with_way_on(message, folder.parent if folder is not None and is_last_word else None))

    def _here(self) -> str:
        h = self.heartbeat
        return whereabouts(Record(h.rank, h.host, h.pid, step=h.step, phase=h.phase))


def early_folder() -> Path | None:
    """Return the folder of this host's heartbeats until the run's folder is known: the launcher's, or a temporary one
    named after the job. None for a single process.
    """
    if (place := meeting_place()) is not None:
        return place / FOLDER
    if get_world_info()[2] == 1:
        return None
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or "job"
    port = os.environ.get("MASTER_PORT", "")
    name = "".join(char if char.isalnum() else "_" for char in f"{job}-{port}-{os.getuid()}")
    return Path(tempfile.gettempdir()) / f"meshwright-{name}" / FOLDER


def announce(run_folder: Path) -> None:
    """Announce the run's folder to our launcher, if any, which continues the run there when a rank is lost."""
    if (place := meeting_place()) is not None:
        replace_text(place / RUN, str(run_folder))


def run_folder(place: Path) -> Path | None:
    """Return the run's folder, as its first rank announced it to the launcher with the temporary folder ``place``."""
    try:
        return Path((place / RUN).read_text())
    except OSError:
        return None


def read_all_records(place: Path) -> dict[int, Record]:
    """Return the heartbeats of a launcher's workers, from the run's folder and the launcher's."""
    folder = run_folder(place)
    return (read_records(folder / FOLDER) if folder else {}) | read_records(place / FOLDER)


def with_way_on(message: str, folder: Path | None) -> str:
    """Return a message, with the command that continues the run in a folder if a checkpoint was saved there."""
    if folder is None or not latest_checkpoint(folder):
        return message
    return f"{message.rstrip('.')}. Continue with: {command('train', folder)}"


def sweep(folder: Path | None) -> None:
    """Remove a folder of early heartbeats once none of its ranks is alive: killed ranks cannot do so themselves."""
    if folder is None or meeting_place() is not None:
        return
    if all(process_state(record) == "gone" for record in read_records(folder).values() if record.pid != os.getpid()):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()
