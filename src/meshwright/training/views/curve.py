"""Draw a loss curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_NOT_A_NUMBER = "×"


class LossCurve:
    """Stores a whole run's losses in bounded memory and draws them in any width.

    When ``capacity`` points are held, neighbours are averaged, and from then on a point stands for twice as many
    losses.
    """

    def __init__(self, capacity: int = 512):
        self._capacity = capacity
        self._points: list[float] = []
        self._losses_per_point = 1
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Append a loss; one that is not finite stays visible as a cross."""
        self._pending.append(loss)
        if len(self._pending) < self._losses_per_point:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) >= self._capacity:
            self._points = [_mean(pair) for pair in _chunks(self._points, math.ceil(len(self._points) / 2))]
            self._losses_per_point *= 2

    def draw(self, width: int) -> str:
        """Draw at most ``width`` characters, one per equal part of the run, from the lowest to the highest loss.

        Empty without a loss.
        """
        points = self._points + ([_mean(self._pending)] if self._pending else [])
        if not points or width < 1:
            return ""
        cells = [_mean(chunk) for chunk in _chunks(points, min(width, len(points)))]
        finite = [cell for cell in cells if math.isfinite(cell)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        return "".join(_bar(cell, low, high) for cell in cells)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    height = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]


def _chunks(points: Sequence[float], count: int) -> list[Sequence[float]]:
    """Cut ``points`` into ``count`` runs (at most one per point) whose lengths differ by at most 1."""
    edges = [round(index * len(points) / count) for index in range(count + 1)]
    return [points[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
