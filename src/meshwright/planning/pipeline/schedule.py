"""Define schedules, the actions of a pipeline's ranks: simulate, read, write and draw them, and place their messages.

Ranks take their actions in order; a forward waits for the previous stage, a backward for the next one, and for the
message between them, if it has a time.

A simulation of the schedule gives the places: a rank sends as soon as it has computed, and its peer begins to receive
at the same moment. So both sides of every pair of ranks name their messages in the same order, which back ends without
tags need.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from meshwright.core.errors import ConfigError

# --- define a pipeline rank's action


class Work(StrEnum):
    """A kind of action, by torch's letter; a backward is whole (B), or I and, later, W (arXiv 2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    INPUT = "I"
    """The gradient of the stage's input."""
    WEIGHT = "W"
    """The gradients of the stage's weights, from what ``I`` saved."""


class Action(NamedTuple):
    """One action, written as torch writes it: ``2F5`` is the forward of stage 2 on microbatch 5."""

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.microbatch}"


_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")


def actions_in(text: str) -> list[Action]:
    """Parse a cell of a schedule's table: no action, one, or two in order that torch would overlap.

    Raises:
        ValueError: the cell holds something else.
    """
    found = [Action(int(stage), Work(work), int(microbatch)) for stage, work, microbatch in _WRITTEN.findall(text)]
    if _WRITTEN.sub("", text).replace("OVERLAP_F_B", "").strip(" ();"):
        raise ValueError(f"{text!r} is no action: write stage, one of F B I W, and microbatch, such as 0F3")
    return found


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of every rank's actions.

    Attributes:
        name: this library's name of the schedule.
        ranks: for each rank of the pipeline axis, its actions in order.
        rank_of: for each stage, the rank that has it.
        microbatches: number of microbatches of a step.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        return any(action.work is Work.INPUT for actions in self.ranks for action in actions)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, where in enumerate(self.rank_of) if where == rank)


# --- simulate a schedule

Cost = Callable[[Action], float]

UNITS = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.INPUT: 1.0, Work.WEIGHT: 1.0}


def unit_cost(action: Action) -> float:
    """Return an action's cost if forward, input gradient and weight gradient take equal time."""
    return UNITS[action.work]


@dataclass(frozen=True)
class Timeline:
    """The times of a simulated schedule.

    Attributes:
        spans: (begin, end) of every action.
        makespan: end of the last action.
        bubbles: for each rank, the share of the makespan in which it waits.
    """

    spans: dict[Action, tuple[float, float]]
    makespan: float
    bubbles: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Mean bubble over the ranks."""
        return sum(self.bubbles) / len(self.bubbles)


@dataclass(frozen=True, eq=False)
class WaitOrder:
    """Actions of all ranks in an order in which they can be done, so that times follow in one pass.

    Attributes:
        lanes: number of ranks.
        actions: every action of the schedule, once.
        ranks: for each, its rank.
        sources: for each, the place in ``actions`` of the one on another rank whose result it receives; -1: none.
    """

    lanes: int
    actions: Sequence[Action]
    ranks: Sequence[int]
    sources: Sequence[int]

    def ends(self, seconds: Sequence[float], message: float = 0.0) -> list[float]:
        """Return when each action ends, given how long each takes, and how long a message to another rank does."""
        clocks, ends = [0.0] * self.lanes, []
        for rank, source, taken in zip(self.ranks, self.sources, seconds, strict=True):
            begin = clocks[rank]
            if source >= 0 and (arrives := ends[source] + message) > begin:
                begin = arrives
            clocks[rank] = begin = begin + taken
            ends.append(begin)
        return ends


def wait_order(schedule: PipelineSchedule) -> WaitOrder:
    """Order the actions of all ranks; ConfigError, naming them, if ranks would wait for each other forever."""
    width = schedule.microbatches
    # by stage and microbatch the place of a forward, and of the gradient of an input; before it has one: -1 if it will
    # have one, -2 if the schedule has none
    forward, backward = ([-2] * (width * schedule.stages + 1) for _ in range(2))
    for stage, work, m in chain.from_iterable(schedule.ranks):
        if work is not Work.WEIGHT:
            (forward if work is Work.FORWARD else backward)[stage * width + m] = -1
    places, found, ranks, sources = [0] * len(schedule.ranks), [], [], []
    last, moved = width * (schedule.stages - 1), True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                stage, work, m = action = actions[places[rank]]
                own, source = stage * width + m, -2
                if work is Work.FORWARD:
                    source, own_before = forward[own - width] if stage else -2, 0
                    here = forward
                elif work is Work.WEIGHT:
                    own_before, here = backward[own], None
                else:
                    source, own_before = backward[own + width] if own < last else -2, forward[own]
                    here = backward
                if source == -1 or own_before == -1:
                    break
                if here is not None:
                    here[own] = len(ranks)
                sources.append(source if source >= 0 and ranks[source] != rank else -1)
                ranks.append(rank)
                found.append(action)
                places[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[places[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if places[rank] < len(actions)
    ]
    if stuck:
        raise ConfigError(f"schedule {schedule.name}: the ranks would wait for each other for ever: {', '.join(stuck)}")
    return WaitOrder(len(places), found, ranks, sources)


def simulate(schedule: PipelineSchedule, cost: Cost = unit_cost, message: float = 0.0) -> Timeline:
    """Simulate a schedule in which messages between ranks take ``message``.

    Raises:
        ConfigError: ranks would wait for each other forever; names the actions.
    """
    order = wait_order(schedule)
    seconds = [cost(action) for action in order.actions]
    ends = order.ends(seconds, message)
    spans = {action: (end - taken, end) for action, end, taken in zip(order.actions, ends, seconds, strict=True)}
    makespan = max(ends)
    busy = (sum(cost(action) for action in actions) for actions in schedule.ranks)
    return Timeline(spans, makespan, tuple(1 - time / makespan for time in busy))


def check_whole(schedule: PipelineSchedule) -> None:
    """Check that every stage does every microbatch once, on its rank, forward first.

    Raises:
        ConfigError: naming the first action that is missing, duplicate or in the wrong place.
    """
    for rank, actions in enumerate(schedule.ranks):
        known: set[Action] = set()
        for action in actions:
            if action.stage >= schedule.stages or schedule.rank_of[action.stage] != rank:
                raise ConfigError(
                    f"schedule {schedule.name}: {action} stands on rank {rank}, which does not have that stage"
                )
            if action in known:
                raise ConfigError(f"schedule {schedule.name}: {action} stands there twice")
            known.add(action)
        for stage in schedule.stages_on(rank):
            for m in range(schedule.microbatches):
                whole, split = (
                    {Action(stage, work, m) for work in works} & known
                    for works in ((Work.BACKWARD,), (Work.INPUT, Work.WEIGHT))
                )
                if Action(stage, Work.FORWARD, m) not in known or len(whole) + len(split) / 2 != 1:
                    here = (
                        ", ".join(sorted(str(a) for a in known if (a.stage, a.microbatch) == (stage, m)))
                        or "none of them"
                    )
                    raise ConfigError(
                        f"schedule {schedule.name}: stage {stage} needs {stage}F{m} and either {stage}B{m} or both"
                        f" {stage}I{m} and {stage}W{m}; rank {rank} has {here}"
                    )
    simulate(schedule)


def peak_live(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count per rank the most (stage, microbatch) pairs alive: forwards whose weight gradients are to come."""
    found = []
    for actions in schedule.ranks:
        live = most = 0
        for action in actions:
            live += {Work.FORWARD: 1, Work.BACKWARD: -1, Work.WEIGHT: -1, Work.INPUT: 0}[action.work]
            most = max(most, live)
        found.append(most)
    return tuple(found)


# --- place a schedule's messages


class Content(StrEnum):
    """The tensor that a message carries."""

    ACTIVATION = "activation"
    """The output of a stage's forward, for the next stage."""
    GRADIENT = "gradient"
    """The output of a stage's backward, for the stage before."""


class Message(NamedTuple):
    """A message to a stage.

    Attributes:
        stage: the receiving stage.
        microbatch: the microbatch of the tensor.
    """

    content: Content
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Send:
    message: Message
    peer: int


@dataclass(frozen=True)
class Receive:
    message: Message
    peer: int


Step = Action | Send | Receive


def message_after(action: Action, stages: int) -> Message | None:
    """Return the message that an action's output needs to another stage, if any."""
    if action.work is Work.FORWARD and action.stage + 1 < stages:
        return Message(Content.ACTIVATION, action.stage + 1, action.microbatch)
    if action.work in (Work.BACKWARD, Work.INPUT) and action.stage > 0:
        return Message(Content.GRADIENT, action.stage - 1, action.microbatch)
    return None


def message_before(action: Action, stages: int) -> Message | None:
    """Return the message that an action needs from another stage, if any."""
    if action.work is Work.FORWARD and action.stage > 0:
        return Message(Content.ACTIVATION, action.stage, action.microbatch)
    if action.work in (Work.BACKWARD, Work.INPUT) and action.stage + 1 < stages:
        return Message(Content.GRADIENT, action.stage, action.microbatch)
    return None


def programs(schedule: PipelineSchedule) -> tuple[tuple[Step, ...], ...]:
    """List the steps of each rank; stages on the same rank exchange no messages."""
    spans = simulate(schedule).spans
    timed: list[list[tuple[float, int, Step]]] = [[] for _ in schedule.ranks]
    for rank, actions in enumerate(schedule.ranks):
        timed[rank] += [(spans[action][0], 1, action) for action in actions]
    for action in sorted(spans, key=lambda a: (spans[a][1], a.stage, a.microbatch)):
        message = message_after(action, schedule.stages)
        if message is None:
            continue
        source, target = schedule.rank_of[action.stage], schedule.rank_of[message.stage]
        if source != target:  # when the tensor is computed, before the actions that begin then
            timed[source].append((spans[action][1], 0, Send(message, target)))
            timed[target].append((spans[action][1], 0, Receive(message, source)))
    return tuple(tuple(step for *_, step in sorted(steps, key=lambda entry: entry[:2])) for steps in timed)


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
