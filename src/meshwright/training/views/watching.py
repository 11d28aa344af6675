"""Watch the loop beside its figures: recordings, the comparison with a trace, the search for stragglers."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError
from meshwright.core.files import replace_text
from meshwright.distributed.process import agree, flight
from meshwright.distributed.process.world import get_world_info, is_rank_zero
from meshwright.distributed.setup import choose_backend
from meshwright.distributed.step.results import StepLoss, StepResult
from meshwright.training.build import Run
from meshwright.training.config import Config
from meshwright.training.health.stragglers import Stragglers
from meshwright.training.metrics.trackers import check_trackers
from meshwright.training.profiling.profiling import Profile
from meshwright.training.profiling.recording import Recording, check_recordings, open_recordings
from meshwright.training.run.folder import RunFolder
from meshwright.training.tracing import TraceCheck

from .telling import Teller, in_words


def check_watching(config: Config) -> None:
    """Refuse trackers and recordings that are unavailable here, before the run is built.

    Raises:
        MissingExtraError: a tracker is not installed.
        UnsupportedError: this device does not support a recording.
    """
    check_trackers(config.logging)
    check_recordings(config.logging, choose_backend(config.process.backend)[1])


class Watch:
    """Watches a loop; every method is called on all ranks alike.

    Args:
        teller: prints the messages.
        trace: compares the first steps; None without a trace.
    """

    def __init__(self, run: Run, folder: RunFolder, teller: Teller, trace: TraceCheck | None):
        self.teller, self.folder, self.trace = teller, folder, trace
        whole = [axis for axis, size in run.plan.mesh if size == run.plan.world > 1]

        def profile(path: Path) -> Recording:
            return Profile(path, run.model.parts, run.model.device, whole[0] if whole else "world")

        self.recordings = open_recordings(
            run.config.logging, run.config.steps, folder.path, get_world_info()[0], profile
        )
        self.stragglers = None if agree.alone() else Stragglers(flight.issued, agree.everybody_says)

    def begin(self, step: int) -> None:
        """Prepare to train from ``step`` on.

        Raises:
            ConfigError: the run is past the steps to compare with a trace, and has not compared them.
        """
        self.recordings.announce(step, self.teller.say)
        if step and self.trace is not None:
            if not agree.from_rank_zero(self.folder.trace_check.is_file()):
                raise ConfigError(
                    f"check_trace = {self.trace.trace.path}: a trace begins at step 0, and this run goes on from step"
                    f" {step}; leave check_trace out"
                )
            self.teller.say(f"its first steps were compared with a trace already: {self.folder.trace_check}")
            self.trace = None

    def before(self, step: int) -> None:
        """Start the recordings that begin with this step."""
        if self.recordings.begins_before(step):
            self.disturbed()
            self.recordings.before(step)

    def got_data(self, seconds: float) -> None:
        """Record how long the step waited for its batch."""
        if self.stragglers is not None:
            self.stragglers.got_data(seconds)

    def computing(self, batch: Any) -> AbstractContextManager[None]:
        """Observe the step's forward and backward for the trace."""
        return nullcontext() if self.trace is None else self.trace.watching(batch)

    def after(self, step: int, loss: StepLoss, result: StepResult) -> None:
        """Compare the finished step with the trace, and stop the recordings that end with it.

        Raises:
            IntegrityError: the step differs from the trace.
        """
        if self.trace is not None:
            self._compare(self.trace, loss, result)
        if self.recordings.ends_after(step):
            self.disturbed()  # writing is not part of the step
            self.teller.note(lambda: self.recordings.after(step))

    def _compare(self, trace: TraceCheck, loss: StepLoss, result: StepResult) -> None:
        found = trace.compared(loss, result)
        if found is None:
            return
        text = json.dumps({"trace": str(trace.trace.path), **found.plain()}, indent=1)
        writing = in_words(lambda: replace_text(self.folder.trace_check, text), f"cannot write in {self.folder.path}")
        agree.together(writing, here=is_rank_zero())
        trace.refuse(found)
        self.teller.say(trace.text(found))
        self.trace = None

    def met(self, step: int) -> dict[str, float]:
        """Record that the ranks have just agreed to continue after ``step``; return further figures, if any."""
        if self.stragglers is None:
            return {}
        figures = self.stragglers.met(step)
        if self.stragglers.sentence:
            self.teller.say(self.stragglers.sentence)
            self.teller.event("straggler", {"text": self.stragglers.sentence, **figures}, step)
        return figures

    def disturbed(self) -> None:
        """Leave the next step out of the search for stragglers: other work was done since the last one."""
        if self.stragglers is not None:
            self.stragglers.disturbed()

    def close(self) -> None:
        """Write the recordings that are still open at the end of the run."""
        self.teller.note(self.recordings.close)
