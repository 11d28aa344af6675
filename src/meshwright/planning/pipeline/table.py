"""Read and write schedules as CSV tables, as torch's schedules do, and draw their timelines."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from html import escape
from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.planning.pipeline.simulate import (
    Action,
    PipelineSchedule,
    Timeline,
    Work,
    actions_in,
    check_whole,
    peak_live,
)

# --- read and write schedules as CSV tables with a row per rank and a cell per action, as torch's schedules do

KEY = "techniques.pipeline_schedule"


def read_schedule(path: str | Path) -> PipelineSchedule:
    """Read a schedule from a CSV file: row r has the actions of rank r in order, ``0F0`` each; empty cells are waits.

    Raises:
        ConfigError: there is no such file, a cell is no action, or the schedule is not whole or cannot be done.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{KEY} = {path}: there is no such file")
    ranks: list[tuple[Action, ...]] = []
    with file.open(newline="", encoding="utf-8") as text:
        for number, row in enumerate(csv.reader(text)):
            try:
                ranks.append(tuple(action for cell in row for action in actions_in(cell)))
            except ValueError as error:
                raise ConfigError(f"{KEY} = {path}: row {number + 1}: {error}") from None
    if not ranks or not all(ranks):
        raise ConfigError(
            f"{KEY} = {path}: it has {len(ranks)} rows, one for each rank, and every one must have an action"
        )
    home = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    missing = sorted(set(range(max(home) + 1)) - set(home))
    if missing:
        raise ConfigError(f"{KEY} = {path}: it has stages up to {max(home)}, but no action of stage {missing[0]}")
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    made = PipelineSchedule(str(path), tuple(ranks), tuple(home[stage] for stage in sorted(home)), microbatches)
    check_whole(made)
    return made


def write_schedule(schedule: PipelineSchedule, path: str | Path) -> None:
    """Write a schedule so that ``read_schedule`` and torch read it."""
    with Path(path).open("w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows([str(action) for action in actions] for actions in schedule.ranks)


# --- draw a schedule's timeline as text and as a picture

Span = tuple[Action, float, float]
"""An action, its begin and its end."""

CELLS = 120
"""Number of columns of a terminal's row."""
COLOURS = {Work.FORWARD: "#4c78a8", Work.BACKWARD: "#54a24b", Work.INPUT: "#72b7b2", Work.WEIGHT: "#eeca3b"}
HEIGHT, MARGIN, WIDTH = 26, 60, 1200


def spans_of(schedule: PipelineSchedule, timeline: Timeline) -> list[list[Span]]:
    """List each rank's spans in its order."""
    return [[(action, *timeline.spans[action]) for action in actions] for actions in schedule.ranks]


def text_of(schedule: PipelineSchedule, timeline: Timeline) -> str:
    """Draw each rank's actions: F B I W with the microbatch's last digit; dots are waits.

    Stages after a rank's first are in lower case. A column is a unit of time if they all fit into a terminal.
    """
    unit = max(timeline.makespan / CELLS, min(end - begin for begin, end in timeline.spans.values()) / 2)
    rows = []
    for rank, spans in enumerate(spans_of(schedule, timeline)):
        cells = ["·"] * round(timeline.makespan / unit)
        for action, begin, end in spans:
            first, last = round(begin / unit), max(round(end / unit), round(begin / unit) + 1)
            loop = schedule.stages_on(rank).index(action.stage)
            letter = str(action.work) if loop == 0 else str(action.work).lower()
            word = f"{letter}{action.microbatch % 10}"
            cells[first:last] = (
                list((word * (last - first))[: last - first])
                if last - first < 2
                else list(word.ljust(last - first, "-"))
            )
        rows.append(f"  rank {rank:>2}  {''.join(cells)}")
    return "\n".join([*rows, "", facts_of(schedule, timeline)])


def facts_of(schedule: PipelineSchedule, timeline: Timeline) -> str:
    """Format the numbers under a timeline."""
    kept = ", ".join(map(str, peak_live(schedule)))
    waits = ", ".join(f"{bubble:.1%}" for bubble in timeline.bubbles)
    return "\n".join(
        [
            f"  {schedule.name}: {len(schedule.ranks)} ranks, {schedule.stages} stages, {schedule.microbatches}"
            f" microbatches",
            f"  bubble {timeline.bubble:.1%} of the time (by rank: {waits})",
            f"  activations kept at most, in microbatches of a stage, by rank: {kept}",
            "  F forward, B backward, I gradient of the input, W gradients of the weights; lower case: a rank's"
            " further stages",
        ]
    )


def svg_of(title: str, ranks: Iterable[Iterable[Span]]) -> str:
    """Draw the spans of ranks as SVG, with a tooltip for each action."""
    rows = [list(spans) for spans in ranks]
    begin = min((first for spans in rows for _, first, _ in spans), default=0.0)
    length = max((last for spans in rows for *_, last in spans), default=1.0) - begin or 1.0
    scale = WIDTH / length
    parts = []
    for rank, spans in enumerate(rows):
        top = 40 + rank * HEIGHT
        parts.append(f'<text x="4" y="{top + 16}">rank {rank}</text>')
        for action, first, last in spans:
            x, wide = MARGIN + (first - begin) * scale, max((last - first) * scale, 0.5)
            what = (
                f"{action}: stage {action.stage}, {action.work.name.lower()}, microbatch {action.microbatch},"
                f" {last - first:.4g}"
            )
            label = f'<text x="{x + 2:.1f}" y="{top + 16}" class="a">{action.microbatch}</text>' if wide > 12 else ""
            shade = 1.0 if action.stage < len(rows) else 0.6
            parts.append(
                f'<g><title>{escape(what)}</title><rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{HEIGHT - 4}"'
                f' fill="{COLOURS[action.work]}" fill-opacity="{shade}" stroke="#fff" stroke-width="0.5"/>{label}</g>'
            )
    legend = "".join(
        f'<rect x="{MARGIN + 130 * i}" y="22" width="10" height="10" fill="{colour}"/><text'
        f' x="{MARGIN + 14 + 130 * i}" y="31">'
        f"{work.name.lower()}</text>"
        for i, (work, colour) in enumerate(COLOURS.items())
    )
    size = f'viewBox="0 0 {MARGIN + WIDTH + 10} {50 + len(rows) * HEIGHT}"'
    style = "<style>text{font:11px sans-serif}.a{font-size:9px;fill:#fff}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}<text x="4" y="14">{escape(title)}</text>'
    return f"{head}{legend}{''.join(parts)}</svg>\n"
