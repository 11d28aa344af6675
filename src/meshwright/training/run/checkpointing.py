"""Save a run's checkpoints, and continue from the newest whole one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.loading import load
from meshwright.checkpoint.saving import write
from meshwright.checkpoint.store import Location
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.core.errors import IntegrityError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.training.build import Run
from meshwright.training.feed import UnreadSamples
from meshwright.training.health.peers import with_way_on
from meshwright.training.run.folder import RunFolder
from meshwright.training.throughput import StartupTimeline


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

    def __init__(self, run: Run, folder: RunFolder, at: Position, say: Callable[[str], None]):
        self.r, self.run_folder, self.at, self.say = run, folder.path, at, say
        elsewhere = run.config.checkpoint.folder
        self.folder = CheckpointFolder(elsewhere) if elsewhere else folder.checkpoints
        agree.together(lambda: self.folder.refuse_others(run.identity), here=is_rank_zero() and bool(elsewhere))
        self.latest: Location | None = None

    def save(self) -> None:
        """Write this step's checkpoint, then remove old ones.

        Raises:
            IntegrityError: a rank could not write (raised on every rank); the previous checkpoint is the newest one.
        """
        begun = time.perf_counter()
        path = self.folder.of_step(self.at.step)
        state = {**vars(self.at), "consumed": self.r.feed.loader.state}
        size = write(
            self.r.model,
            path,
            optimizer=self.r.optimizer.optimizer,
            extra={"state": state, "identity": self.r.identity},
            only_trained=self.r.config.adapters is not None,
            after=self.latest,
        )

        def remove_old() -> None:
            try:
                self.folder.keep_last(self.r.config.checkpoint.keep_last)
            except OSError as error:
                self.say(f"old checkpoints in {self.folder.path} could not be removed: {error}")

        agree.together(remove_old, here=is_rank_zero())
        self.latest = path
        self.say(f"saved {path} ({bytes_text(size)}, {duration_text(time.perf_counter() - begun)})")

    @contextmanager
    def saved_if_unread(self) -> Iterator[None]:
        """Save the steps before this one if its samples cannot be read, and say how to go on."""
        consumed = self.r.feed.loader.state
        try:
            yield
        except UnreadSamples as error:
            self.r.feed.loader.seek(consumed)
            if self.at.step and self.latest != self.folder.of_step(self.at.step):
                self.save()
            raise UnreadSamples(with_way_on(str(error), self.run_folder)) from error

    def resume(self, timeline: StartupTimeline) -> bool:
        """Load the newest whole checkpoint, and report unusable ones beside it. Returns False without a checkpoint.

        Raises:
            IntegrityError, ConfigError: the checkpoint cannot be loaded.
        """
        for leftover in self.folder.half_written():
            self.say(f"{leftover} was never finished (an interrupted save); it is not used")
        latest, problems = agree.from_rank_zero(agree.together(self.folder.newest, here=is_rank_zero()))
        for problem in problems:
            self.say(f"{problem}: this checkpoint is not used")
        if latest is None:
            return False
        with timeline.phase("checkpoint"):
            extra = load(self.r.model, latest, optimizer=self.r.optimizer.optimizer, restore_options=False)
        try:
            *at, consumed = (int(extra["state"][key]) for key in ("step", "tokens", "skipped", "consumed"))
            self.at.skipped_in_a_row = int(extra["state"].get("skipped_in_a_row", 0))
            self.at.losses = [float(loss) for loss in extra["state"].get("losses", [])]
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"{latest} does not say how far its run was ({type(error).__name__}: {error}); use an older one"
            ) from None
        self.at.step, self.at.tokens, self.at.skipped = at
        self.r.feed.loader.seek(consumed)
        self.latest = latest
        self.say(f"continuing from {latest} (step {self.at.step}, sample {consumed:,})")
        return True
