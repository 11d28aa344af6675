"""Save a run's checkpoints, and continue from the newest whole one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.checkpoint.background import Saver
from meshwright.checkpoint.folder import CheckpointFolder, TakenOver
from meshwright.checkpoint.hosts import load_from_hosts, open_host_memory
from meshwright.checkpoint.loading import load, load_newest
from meshwright.checkpoint.saving import Handle, finish_saves, is_beside, write
from meshwright.checkpoint.snapshot import boxes_of, portions
from meshwright.checkpoint.state import stored_state
from meshwright.checkpoint.store import Location
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero, ranks_per_node
from meshwright.training.build import Run
from meshwright.training.feed import UnreadSamples
from meshwright.training.health.peers import with_way_on
from meshwright.training.memory import memory_left
from meshwright.training.run.folder import RunFolder
from meshwright.training.stopping import StopRequest
from meshwright.training.throughput import StartupTimeline

IN_MEMORY = "the memory of the hosts"
GRACE_SEC = 10.0
"""Time that a run which an error ends gives the save under way."""


@dataclass
class Position:
    """The progress of a run. A checkpoint stores it beside the tensors, with the loader's state (samples consumed)."""

    step: int = 0
    """Finished optimizer steps."""
    tokens: int = 0
    skipped: int = 0
    """Steps that were skipped, for numbers that were not finite or a loss that was too high."""
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """The last losses, where a guard looks at them."""


class Checkpointing:
    """Saves a run and continues it. Every method is collective.

    Attributes:
        latest: the checkpoint that the run would continue from, None without one.
    """

    def __init__(self, run: Run, folder: RunFolder, at: Position, say: Callable[[str], None], stop: StopRequest):
        self.r, self.run_folder, self.at, self.say = run, folder.path, at, say
        self.claim = folder.claim
        elsewhere = run.config.checkpoint.folder
        self.folder = CheckpointFolder(elsewhere or folder.path / "checkpoints")
        self.latest: Location | None = None
        self.pending: tuple[Handle, int] | None = None
        self.failed = -1  # step of the last save that is known to have failed, until the next
        c, ranks = run.config.checkpoint, ranks_per_node() or 1
        beside, most = c.asynchronous and is_beside(c.folder, say), math.ceil(c.host_memory * 2**30)
        left = functools.partial(memory_left, ranks)
        self.saver = (
            Saver(most, c.when_busy, say, left, stopped=lambda: stop.signal, claim=folder.claim) if beside else None
        )
        if self.saver is not None and most:
            agree.together(lambda: portions(boxes_of(stored_state(run.model)), most))  # refuses too little at once
        self.memory = open_host_memory(folder.path, c.memory_folder) if c.memory_every else None
        self.kept: Handle | None = None
        self.kept_step, self.is_late_told = 0, False

    @property
    def _given(self) -> dict[str, Any]:
        """What a save of this step takes beside the model."""
        extra = {"state": {**vars(self.at), "consumed": self.r.feed.loader.state}, "identity": self.r.identity}
        only_trained = self.r.config.adapters is not None
        return {"optimizer": self.r.optimizer.optimizer, "extra": extra, "only_trained": only_trained}

    def keep(self) -> None:
        """Begin to keep this step's state in the hosts' memory if it is due, and no save is under way."""
        if self.memory is None or self.saver is None or self.at.step % self.r.config.checkpoint.memory_every:
            return
        if self.kept is not None and self.kept.done and self.kept.problem and not self.kept.skipped:
            self.say(self.kept.problem)
        try:
            path = self.memory.of_step(self.at.step)
            kept = self.saver.begin(self.r.model, path, memory=self.memory, **self._given)
            if not kept.skipped and self.kept is not None and self.kept.skipped and not self.is_late_told:
                self.is_late_told, every = True, self.at.step - self.kept_step
                self.say(
                    f"a state takes longer to keep in memory than checkpoint.memory_every ="
                    f" {self.r.config.checkpoint.memory_every} steps: the newest is {every} steps old, and one in about"
                    f" {every} steps is kept"
                )
            self.kept, self.kept_step = kept, self.kept_step if kept.skipped else self.at.step
        except ConfigError as error:
            self.say(str(error))
            self.memory = None

    def save(self, *, is_last: bool = False) -> None:
        """Begin this step's checkpoint; it is whole, and old ones are removed, some steps later (``look``, ``finish``).

        Args:
            is_last: nothing goes on beside this one: it is written at once, after the one under way.

        Raises:
            IntegrityError: a rank could not write what is written at once (raised on every rank).
            TakenOver: another job saves there by now (raised on every rank).
        """
        path, given, handle = self.folder.of_step(self.at.step), self._given, None
        if self.saver is not None and not is_last:
            try:
                handle = self.saver.begin(self.r.model, path, in_run=True, then=self._remove_old, **given)
            except TakenOver:
                raise
            except ConfigError as error:
                self.say(f"{error}. Saves are synchronous from here on")
                self.saver = None
        if handle is None:
            self._wait()
        if handle is None or not handle.skipped:
            self.look()
            self.failed = -1
        if handle is None:
            handle = Handle(path)
            handle.bytes = write(self.r.model, path, **given, after=self.latest, claim=self.claim)
            agree.together(self._remove_old, here=is_rank_zero())
            handle.end()
        if handle.skipped:
            self.say(handle.problem)
            return
        self.pending = handle, self.at.step
        self.look()

    def _remove_old(self) -> None:
        try:
            if self.claim is not None:
                self.claim.check()
            self.folder.keep_last(self.r.config.checkpoint.keep_last)
        except (OSError, MeshwrightError) as error:
            self.say(f"old checkpoints in {self.folder.path} could not be removed: {error}")

    def _wait(self) -> None:
        """Return when no save is under way on any rank; ``look`` may have told one rank so and not yet another."""
        if self.saver is None:
            finish_saves(agree.any_rank)
        elif self.saver.current is not None:
            self.saver.wait_for(self.saver.current)

    def look(self) -> None:
        """Say how the save under way ended, if it did."""
        if self.pending is None or not self.pending[0].done:
            return
        (handle, step), self.pending = self.pending, None
        if handle.problem:
            self.failed = step
            last = f"last whole: {self.latest}" if self.latest else "none is whole so far"
            self.say(f"{handle.problem}. The next save tries again; {last}")
            return
        self.latest = self.folder.of_step(step)
        self.say(f"saved {self.latest} ({bytes_text(handle.bytes)}, {duration_text(handle.seconds)})")

    def finish(self) -> None:
        """Return when no save is under way; one of this very step that failed is tried once more. Collective.

        Raises:
            IntegrityError: that failed too (raised on every rank).
        """
        self._wait()
        self.look()
        if agree.any_rank(self.failed == self.at.step):
            self.save(is_last=True)

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process that writes; where an error ends the run the save under way has a moment, where somebody
        interrupts it for the second time none.
        """
        if self.saver is not None:
            self.saver.close(0 if kind is KeyboardInterrupt else None if kind is None else GRACE_SEC)
        if self.memory is not None and self.memory.is_first and kind is None:  # the last state is on disk
            self.memory.forget()

    @contextmanager
    def saved_if_unread(self) -> Iterator[None]:
        """Save the steps before this one if its samples cannot be read, and say how to go on."""
        consumed = self.r.feed.loader.state
        try:
            yield
        except UnreadSamples as error:
            self.r.feed.loader.seek(consumed)
            self.finish()
            if self.at.step and self.latest != self.folder.of_step(self.at.step):
                self.save(is_last=True)
            raise UnreadSamples(with_way_on(str(error), self.run_folder)) from error

    def resume(self, timeline: StartupTimeline) -> bool:
        """Load the newest whole checkpoint, and report unusable ones beside it. Returns False without a checkpoint.

        Raises:
            IntegrityError, ConfigError: the checkpoint cannot be loaded.
        """
        if self.claim is not None and self.claim.before:
            self.say(
                f"{self.claim.folder} was last used by {self.claim.before}: if it still runs, its next save ends it"
            )
        for leftover in self.folder.half_written():
            self.say(f"{leftover} was never finished (an interrupted save), or is damaged; it is not used")
        found = None
        with timeline.phase("checkpoint"):
            if self.memory is not None:
                newest = agree.decided_once(lambda: max(self.folder.steps(), default=0))
                kept = load_from_hosts(self.memory, newest, self._load, self.say)
                found = (IN_MEMORY, kept) if kept is not None else None
            found = found or load_newest(self.folder, self._load, self.say, set_aside=True)
        if found is None:
            return False
        source, extra = found
        try:
            *at, consumed = (int(extra["state"][key]) for key in ("step", "tokens", "skipped", "consumed"))
            self.at.skipped_in_a_row = int(extra["state"].get("skipped_in_a_row", 0))
            self.at.losses = [float(loss) for loss in extra["state"].get("losses", [])]
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"{source} does not say how far its run was ({type(error).__name__}: {error}); use an older one"
            ) from None
        self.at.step, self.at.tokens, self.at.skipped = at
        self.r.feed.loader.seek(consumed)
        self.latest = agree.decided_once(self.folder.latest) if source == IN_MEMORY else source
        if self.at.step < self.r.config.steps:
            self.say(f"continuing from {source} (step {self.at.step}, sample {consumed:,})")
        return True

    def _load(self, location: Location) -> dict[str, Any]:
        return load(self.r.model, location, optimizer=self.r.optimizer.optimizer, restore_options=False)
