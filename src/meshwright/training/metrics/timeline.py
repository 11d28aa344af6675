"""Time the phases before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.core.units import duration_text


class StartupTimeline:
    """Named phases of a start, in the order in which they first ran, with their wall-clock seconds.

    Example::

        timeline = StartupTimeline()
        timeline.record_process_age("imports")
        with timeline.phase("weights"):
            model.materialise()
        timeline.line()  # "imports 1.9 s · weights 0.2 s"

    Args:
        on_phase: called with the name of each phase as it begins.
    """

    def __init__(self, on_phase: Callable[[str], object] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in order; a copy."""
        return dict(self._seconds)

    def record(self, name: str, seconds: float) -> None:
        """Add ``seconds`` that were measured elsewhere; those of one name are summed."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def record_process_age(self, name: str = "imports") -> None:
        """Record the seconds since this process began, minus the recorded ones: the interpreter's start and imports."""
        import psutil

        age = time.time() - psutil.Process().create_time()
        self.record(name, max(age - sum(self._seconds.values()), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises. Phases do not nest: an inner one would be counted twice."""
        if self._on_phase is not None:
            self._on_phase(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - began)

    def line(self) -> str:
        """Return all phases in one line: ``"imports 1.9 s · process group 0.3 s · data 0.8 s"``."""
        return " · ".join(f"{name} {duration_text(seconds)}" for name, seconds in self._seconds.items())
