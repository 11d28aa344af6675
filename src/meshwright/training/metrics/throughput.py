"""Measure tokens per second over the last steps, and the time that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Throughput:
    """Mean speed of the last ``window`` steps.

    The caller adds the seconds of a step alone: data, forward, backward, optimizer. Validation and saving are not
    added, so they neither lower the speed nor enter the estimate. The first step, which pays for allocation and
    compilation, counts only until there is a second.
    """

    def __init__(self, window: int = 20):
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=window)
        self._added = 0

    def add(self, row_lengths: Sequence[int], seconds: float) -> None:
        """Add a step: the tokens of its rows over all ranks, without padding, and its wall-clock seconds."""
        if self._added == 1:
            self._steps.clear()
        self._steps.append((sum(row_lengths), seconds, sum(length * length for length in row_lengths)))
        self._added += 1

    @property
    def row_length(self) -> float:
        """Tokens of the row that a token of the window stands in, on the average; 0.0 before the first step."""
        tokens = sum(t for t, *_ in self._steps)
        return sum(squares for *_, squares in self._steps) / tokens if tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the window; 0.0 before the first step."""
        seconds = sum(s for _, s, _ in self._steps)
        return sum(t for t, *_ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step over the window; 0.0 before the first step."""
        return sum(s for _, s, _ in self._steps) / len(self._steps) if self._steps else 0.0

    def eta_seconds(self, remaining_steps: int) -> float | None:
        """Estimate the seconds of ``remaining_steps`` more steps at this speed; None before the first step."""
        return self.seconds_per_step * remaining_steps if self._steps else None
