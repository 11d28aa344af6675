"""Draw a step in time: a lane for each pipeline rank, with its waits, and messages beside it."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.dtypes import duration_text
from meshwright.simulation.search.search import Candidate
from meshwright.simulation.workload.timeline import LaneBar, LaneUse, StepTimeline
from meshwright.training.views.page.charts import ChartAxis, table

from .picture import LEFT, RIGHT, TOP, WIDTH, figure, seconds_axis, seconds_ticks, title

HIGH, LOW, GAP, BOTTOM = 18, 6, 4, 26
MOST_BARS = 4000
"""Bars that are drawn one by one, with a text each, at most."""
COLOURS = {
    LaneUse.FORWARD: 0,
    LaneUse.BACKWARD: 2,
    LaneUse.INPUT: 2,
    LaneUse.WEIGHT: 4,
    LaneUse.EXPOSED: 1,
    LaneUse.DATA: 3,
    LaneUse.OPTIMIZER: 6,
    LaneUse.SENT: 5,
    LaneUse.HIDDEN: 5,
}


def lanes_figure(candidate: Candidate, timeline: StepTimeline) -> str:
    """Draw the lanes of a candidate's step."""
    x, ranks = seconds_axis(timeline.seconds), len(timeline.work)
    each = HIGH + LOW + GAP
    bottom = TOP + ranks * each
    parts = [seconds_ticks(x, bottom)]
    whole = sum(map(len, timeline.work)) + sum(map(len, timeline.beside)) <= MOST_BARS
    for rank in range(ranks):
        top = TOP + rank * each
        name = f"rank {rank}" if ranks > 1 else "every GPU"
        parts.append(f'<text class="value" x="{LEFT - 6}" y="{top + 13}">{name}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{top}" width="{WIDTH - RIGHT - LEFT}" height="{HIGH}"/>')
        draw = _bars if whole else _merged
        parts += draw(timeline.work[rank], x, top, HIGH) + draw(timeline.beside[rank], x, top + HIGH + 1, LOW - 1)
    used = {bar.use for lane in (*timeline.work, *timeline.beside) for bar in lane}
    names = [(COLOURS[use], str(use)) for use in LaneUse if use in used]
    caption = "A step of each pipeline rank" if ranks > 1 else "A step"
    return figure(caption, _says(candidate, timeline), names, (WIDTH, bottom + BOTTOM), parts, _table(timeline))


def _says(candidate: Candidate, timeline: StepTimeline) -> str:
    job, time = candidate.job, candidate.time
    step = f"A step takes {duration_text(timeline.seconds)}"
    if job.layout.pp > 1:
        idle = [timeline.seconds - timeline.busy(rank) for rank in range(job.layout.pp)]
        return (
            f"{step}, of which the ranks of the pipeline ({job.schedule}, {job.microbatches} microbatches) wait"
            f" {duration_text(min(idle))} to {duration_text(max(idle))}: grey."
        )
    exposed = sum(bar.end - bar.begin for bar in timeline.work[0] if bar.use in (LaneUse.EXPOSED, LaneUse.DATA))
    return (
        f"{step}, of which messages that nothing hides take {duration_text(exposed)}; further"
        f" {duration_text(time.hidden_s)} of messages run behind the work."
    )


def _bars(bars: Sequence[LaneBar], x: ChartAxis, top: float, height: float) -> list[str]:
    return [
        f'<rect class="f{COLOURS[bar.use]}" x="{x(bar.begin):.2f}" y="{top}" height="{height}"'
        f' width="{x(bar.end) - x(bar.begin):.2f}" data-end="{bar.end!r}">{title(_words(bar))}</rect>'
        for bar in bars
    ]


def _words(bar: LaneBar) -> str:
    return f"{bar.label + ': ' if bar.label else ''}{bar.use}, {duration_text(bar.end - bar.begin)}"


def _merged(bars: Sequence[LaneBar], x: ChartAxis, top: float, height: float) -> list[str]:
    """Draw very many bars by columns of the picture: each column has the use with most of its time."""
    columns: dict[int, dict[LaneUse | None, float]] = {}
    for bar in bars:
        begin, end = x(bar.begin), x(bar.end)
        for column in range(int(begin), int(end) + 1):
            inside = min(end, column + 1) - max(begin, column)
            seconds = columns.setdefault(column, {})
            seconds[bar.use] = seconds.get(bar.use, 0.0) + inside
    paths: dict[LaneUse, list[str]] = {}
    for column, seconds in sorted(columns.items()):
        use, most = max(seconds.items(), key=lambda pair: pair[1])
        if use is not None and most > 1 - sum(seconds.values()):
            paths.setdefault(use, []).append(f"M{column} {top}h1v{height}h-1z")
    return [f'<path class="f{COLOURS[use]}" d="{"".join(words)}">{title(use)}</path>' for use, words in paths.items()]


def _table(timeline: StepTimeline) -> str:
    rows = []
    for rank, lane in enumerate(timeline.work):
        seconds = {use: sum(bar.end - bar.begin for bar in lane if bar.use is use) for use in LaneUse}
        words = ", ".join(f"{use} {duration_text(taken)}" for use, taken in seconds.items() if taken)
        waits = timeline.seconds - timeline.busy(rank)
        rows.append((str(rank), words, f"{duration_text(waits)} ({waits / timeline.seconds:.1%})"))
    return table(("pipeline rank", "time", "waits"), rows)
