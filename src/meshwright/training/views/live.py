"""Show a run live on a terminal: a bar, current figures, the loss so far, the last logged steps."""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.core.dtypes import count_text
from meshwright.training.views.progress import INTERVAL, Progress, StepReport, header_rows

_BARS = "▁▂▃▄▅▆▇█"
_NOT_A_NUMBER = "×"
_HISTORY_ROWS = 10
_FIGURE_WIDTH = 24
_FRAMES_PER_SECOND = 8


class LossCurve:
    """Stores a whole run's losses in bounded memory and draws them in any width.

    When ``capacity`` points are held, neighbours are averaged, and from then on a point stands for twice as many
    losses.
    """

    def __init__(self, capacity: int = 512):
        self._capacity, self._losses_per_point = capacity, 1
        self._points: list[float] = []
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Append a loss; one that is not finite stays visible as a cross."""
        self._pending.append(loss)
        if len(self._pending) < self._losses_per_point:
            return
        self._points += _means(self._pending, 1)
        self._pending.clear()
        if len(self._points) >= self._capacity:
            self._points = _means(self._points, math.ceil(len(self._points) / 2))
            self._losses_per_point *= 2

    def draw(self, width: int) -> str:
        """Draw at most ``width`` characters, one per equal part of the run, from the lowest to the highest loss.

        Empty without a loss.
        """
        points = self._points + (_means(self._pending, 1) if self._pending else [])
        if not points or width < 1:
            return ""
        cells = _means(points, min(width, len(points)))
        finite = [cell for cell in cells if math.isfinite(cell)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        heights = [(cell - low) / (high - low) * len(_BARS) if high > low else 0.0 for cell in cells]
        return "".join(
            _BARS[min(int(height), len(_BARS) - 1)] if math.isfinite(cell) else _NOT_A_NUMBER
            for cell, height in zip(cells, heights, strict=True)
        )


def _means(points: Sequence[float], count: int) -> list[float]:
    """Return the means of ``count`` runs of points (at most one per point) whose lengths differ by at most 1."""
    edges = [round(index * len(points) / count) for index in range(count + 1)]
    return [sum(points[start:end]) / (end - start) for start, end in zip(edges, edges[1:], strict=False)]


class LiveProgress(Progress):
    """Draws in place on a terminal.

    There is no drawing thread: a frame is drawn when a step is reported, at most 8 times a second. Text that the
    program prints meanwhile appears above. The cursor, hidden meanwhile, comes back on close, on leaving ``with``,
    and at exit.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._bar: Live | None = None
        self._report: StepReport | None = None
        self._validation_loss: float | None = None
        self._curve = LossCurve()
        self._first_loss = math.nan
        self._history: deque[StepReport] = deque(maxlen=_HISTORY_ROWS)
        self._logged_at = self._drawn_at = -math.inf

    def start(self, header_lines: Sequence[str]) -> None:
        self._end_bar()
        title, rows = header_rows(header_lines)
        self._console.print(Text(title, style="bold"))
        grid = Table.grid(padding=(0, 2))
        for label, text in rows:
            grid.add_row(Text(f"  {label}", style="dim"), Text(text, overflow="fold"))
        self._console.print(grid)
        self._console.print()
        self._live = Live(self._frame(), console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start(refresh=True)
        atexit.register(self.close)

    def update(self, report: StepReport) -> None:
        """Take a report and draw, unless a frame was drawn a moment ago."""
        now = self._clock()
        if self._report is None:
            self._first_loss = report.loss
        self._curve.add(report.loss)
        if report.validation_loss is not None:
            self._validation_loss = report.validation_loss
        self._report = replace(report, validation_loss=self._validation_loss)
        notable = report.validation_loss is not None or report.step >= report.total_steps
        if notable or now - self._logged_at >= INTERVAL:
            self._history.append(report)
            self._logged_at = now
        if notable or now - self._drawn_at >= 1 / _FRAMES_PER_SECOND:
            if self._live is not None:
                self._live.update(self._frame(), refresh=True)
            self._drawn_at = now

    def say(self, text: str) -> None:
        """Print ``text`` above the moving part, where it stays."""
        self._console.print(Text(text))

    def portion(self, what: str, done: int, total: int) -> None:
        """Draw a bar that disappears when it is full."""
        now = self._clock()
        if done >= total:
            self._end_bar()
        elif now - self._drawn_at >= 1 / _FRAMES_PER_SECOND:
            if self._bar is None:
                self._bar = Live(console=self._console, auto_refresh=False, transient=True)
                self._bar.start()
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=total, completed=done, width=40)
            row.add_row(Text(what), bar, Text(f"{done / total:.0%}", style="dim"))
            self._bar.update(row, refresh=True)
            self._drawn_at = now

    def _end_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def close(self) -> None:
        """Draw the last frame, leave it on the screen and give the cursor back."""
        self._end_bar()
        live, self._live = self._live, None
        if live is None:
            return
        atexit.unregister(self.close)
        try:
            live.update(self._frame(), refresh=True)
        finally:
            live.stop()
            self._console.print()

    def _frame(self) -> RenderableType:
        report, width = self._report, self._console.width
        if report is None:
            return Text("waiting for the first step ...", style="dim")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        done, total = report.step, report.total_steps
        step = Text.assemble(("step ", "dim"), (f"{done:,}", "bold"), (f" / {total:,}", "dim"))
        rest = "done" if done >= total else report.eta_text()
        end = Text.assemble(f"{100 * done / total:3.0f} %", (f"  {rest}" if rest else "", "dim"))
        filled = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="green")
        bar.add_row(step, filled if width >= 44 else "", end)
        pairs = report.figures()
        columns = max(1, min(4, width // _FIGURE_WIDTH, len(pairs)))
        figures = Table.grid(padding=(0, 1))
        for _ in range(columns):
            figures.add_column(style="dim", no_wrap=True)
            figures.add_column(no_wrap=True, min_width=11)
        cells: list[Text] = []
        for label, value in pairs:
            is_bad = label == "skipped" or (label == "loss" and not math.isfinite(report.loss))
            style = "not dim bold red" if is_bad else "not dim bold" if label in ("loss", "val loss") else "not dim"
            cells += [Text(label), Text(value, style=style)]
        for start in range(0, len(cells), 2 * columns):
            figures.add_row(*cells[start : start + 2 * columns])
        bars, ends = self._curve.draw(max(min(width // 2, 60), 8)), (self._first_loss, report.loss)
        words = ("loss ", "dim"), (bars, "cyan"), f"  {ends[0]:.3f}", (" → ", "dim"), f"{ends[1]:.3f}"
        curve = Text.assemble(*words, no_wrap=True, overflow="crop")
        parts: list[RenderableType] = [bar, "", figures, "", curve]
        # 3: the blank line and head of the table, and the line on which the cursor rests.
        room = self._console.height - figures.row_count - 4 - 3
        if room > 0 and self._history:
            parts += ["", _history(list(self._history)[-room:], width)]
        return Group(*parts)


def _history(reports: Sequence[StepReport], width: int) -> Table:
    """Return the logged steps as a table; a narrow terminal gets fewer columns."""
    columns: list[tuple[str, Callable[[StepReport], str]]] = [
        ("step", lambda r: f"{r.step:,}"),
        ("loss", lambda r: f"{r.loss:.4f}"),
    ]
    if any(r.validation_loss is not None for r in reports):
        columns.append(("val loss", lambda r: "" if r.validation_loss is None else f"{r.validation_loss:.4f}"))
    columns += [("lr", lambda r: f"{r.learning_rate:.2e}"), ("tokens/s", lambda r: count_text(r.tokens_per_second))]
    if any(r.grad_norm is not None for r in reports):
        columns.append(("grad norm", lambda r: dict(r.figures()).get("grad norm", "")))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name, _ in columns[: max(2, width // 12)]:
        table.add_column(name, justify="right", no_wrap=True, min_width=0 if name == "step" else 8)
    for report in reports:
        table.add_row(*(Text(value(report)) for _, value in columns[: len(table.columns)]))
    return table
