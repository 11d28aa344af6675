"""What watches the loop beside its figures: recordings of a few steps, and the search for the rank that the others wait for."""

from __future__ import annotations

from pathlib import Path

from meshwright.distributed import agree, flight
from meshwright.distributed.setup import choose_backend
from meshwright.distributed.world import get_world_info

from .build import Run
from .config import Config
from .monitoring.profiling import Profile
from .monitoring.recording import Recording, check_recordings, open_recordings
from .monitoring.stragglers import Stragglers
from .monitoring.trackers import check_trackers
from .run_folder import RunFolder
from .telling import Teller


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
    """

    def __init__(self, run: Run, folder: RunFolder, teller: Teller):
        self.teller = teller
        whole = [axis for axis, size in run.plan.mesh if size == run.plan.world > 1]

        def profile(path: Path) -> Recording:
            return Profile(path, run.model.parts, run.model.device, whole[0] if whole else "world")

        self.recordings = open_recordings(run.config.logging, run.config.steps, folder.path, get_world_info()[0], profile)
        self.stragglers = None if agree.alone() else Stragglers(flight.issued, agree.everybody_says)

    def begin(self, step: int) -> None:
        """The run goes on from ``step``."""
        self.recordings.announce(step, self.teller.say)

    def before(self, step: int) -> None:
        """A step begins."""
        if self.recordings.begins_before(step):
            self.disturbed()
            self.recordings.before(step)

    def got_data(self, seconds: float) -> None:
        """Its batch is there; that took so long."""
        if self.stragglers is not None:
            self.stragglers.got_data(seconds)

    def after(self, step: int) -> None:
        """It was taken."""
        if self.recordings.ends_after(step):
            self.disturbed()  # writing is no part of the step
            self.teller.note(lambda: self.recordings.after(step))

    def met(self, step: int) -> dict[str, float]:
        """The ranks have just agreed to go on after ``step``. More figures of it, where there are any."""
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
