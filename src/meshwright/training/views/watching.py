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
    """Refuse what cannot be had here, before anything is made for it.

    Raises:
        MissingExtraError: a tracker that is not installed.
        UnsupportedError: a recording that this device cannot give.
    """
    check_trackers(config.logging)
    check_recordings(config.logging, choose_backend(config.process.backend)[1])


class Watch:
    """Watches a loop; every method is called on all ranks alike.

    Args:
        teller: hears what there is to say.
        trace: compares the first steps.
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
        """The run goes on from ``step``.

        Raises:
            ConfigError: past the steps that were to be compared with a trace.
        """
        self.recordings.announce(step, self.teller.say)
        if step and self.trace is not None:
            if not agree.from_rank_zero(self.folder.trace_check.is_file()):
                raise ConfigError(
                    f"check_trace = {self.trace.trace.path}: a trace begins at step 0, and this run goes on from step"
                    f" {step};"
                    f" leave check_trace out"
                )
            self.teller.say(f"its first steps were compared with a trace already: {self.folder.trace_check}")
            self.trace = None

    def before(self, step: int) -> None:
        """A step begins."""
        if self.recordings.begins_before(step):
            self.disturbed()
            self.recordings.before(step)

    def got_data(self, seconds: float) -> None:
        """Its batch is there; that took so long."""
        if self.stragglers is not None:
            self.stragglers.got_data(seconds)

    def computing(self, batch: Any) -> AbstractContextManager[None]:
        """Around its forward and backward."""
        return nullcontext() if self.trace is None else self.trace.watching(batch)

    def after(self, step: int, loss: StepLoss, result: StepResult) -> None:
        """It was taken.

        Raises:
            IntegrityError: it is not what the trace says.
        """
        if self.trace is not None:
            self._compare(self.trace, loss, result)
        if self.recordings.ends_after(step):
            self.disturbed()  # writing is no part of the step
            self.teller.note(lambda: self.recordings.after(step))

    def _compare(self, trace: TraceCheck, loss: StepLoss, result: StepResult) -> None:
        found = trace.compared(loss, result)
        if found is None:
            return
        said = json.dumps({"trace": str(trace.trace.path), **found.plain()}, indent=1)
        writing = in_words(lambda: replace_text(self.folder.trace_check, said), f"cannot write in {self.folder.path}")
        agree.together(writing, here=is_rank_zero())
        trace.refuse(found)
        self.teller.say(trace.text(found))
        self.trace = None

    def met(self, step: int) -> dict[str, float]:
        """Return the ranks have just agreed to go on after ``step``. More figures of it, where there are any."""
        if self.stragglers is None:
            return {}
        figures = self.stragglers.met(step)
        if self.stragglers.sentence:
            self.teller.say(self.stragglers.sentence)
            self.teller.event("straggler", {"text": self.stragglers.sentence, **figures}, step)
        return figures

    def disturbed(self) -> None:
        """Something that is no step happened since."""
        if self.stragglers is not None:
            self.stragglers.disturbed()

    def close(self) -> None:
        """The run ends."""
        self.teller.note(self.recordings.close)
