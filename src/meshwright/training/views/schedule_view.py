"""Draw the work of a pipeline's ranks over time, as scheduled or as measured in the last step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import inside, read_object, replace_text
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.planning.pipeline.schedules.action import Action, PipelineSchedule, actions_in
from meshwright.planning.pipeline.schedules.draw import Span, spans_of, svg_of, text_of
from meshwright.planning.pipeline.schedules.orders import schedule_kind
from meshwright.planning.pipeline.schedules.simulate import simulate
from meshwright.planning.pipeline.schedules.table import read_schedule

TIMES = "schedule_times.json"
"""File in a run's folder: each pipeline rank's actions in the run's last step, and their times."""
DEEP = 64
"""Assumed blocks per rank if the stages per rank are not given: enough for any schedule."""


def keep_times(model: ParallelModel, folder: Path) -> None:
    """Write the actions and times of the pipeline's last step; nothing without a pipeline. Collective."""
    times = {rank: spans for rank, spans in filter(None, agree.everybody_says(model.action_times())) if spans}
    if times and is_rank_zero():
        ranks = [[[str(action), begin, end] for action, begin, end in times[rank]] for rank in sorted(times)]
        replace_text(
            folder / TIMES,
            json.dumps({"schedule": model.plan.pipeline.schedule if model.plan.pipeline else "", "ranks": ranks}),
        )


def schedule_of(name: str, ranks: int, microbatches: int, per_rank: int | None) -> PipelineSchedule:
    """Find a schedule by name, or in a CSV file, which states ranks and microbatches itself.

    Raises:
        ConfigError: an unknown name, or numbers that the schedule does not support.
    """
    if name.endswith(".csv"):
        return read_schedule(name)
    if ranks < 2 or microbatches < 1:
        raise ConfigError(
            f"--pp = {ranks}, --microbatches = {microbatches}: a pipeline has 2 ranks or more, and a step 1"
            f" microbatch or more"
        )
    kind = schedule_kind(name)
    stages = kind.per_rank(DEEP * ranks, ranks) if per_rank is None else per_rank
    if stages < 1 or (stages != 2 if kind.is_v else stages > 1 and not kind.loops):
        legal = "2" if kind.is_v else "1 or more" if kind.loops else "1"
        raise ConfigError(f"--stages-per-rank = {stages}: {kind.name} has {legal}")
    return kind.build(ranks, microbatches, stages)


def drawn(schedule: PipelineSchedule) -> tuple[str, str]:
    """Draw a schedule as text and SVG; forward, input and weight gradient take the same time, messages none."""
    timeline = simulate(schedule)
    title = (
        f"{schedule.name}, {len(schedule.ranks)} ranks, {schedule.microbatches} microbatches: bubble"
        f" {timeline.bubble:.1%}"
    )
    return text_of(schedule, timeline), svg_of(title, spans_of(schedule, timeline))


def drawn_run(folder: Path) -> tuple[str, str]:
    """Draw a run's last step as text and SVG.

    Raises:
        ConfigError: the run had no pipeline, or has not ended yet.
    """
    file = inside(folder, TIMES)
    if not file.is_file():
        raise ConfigError(f"{folder} holds no {TIMES}: it is written at the end of a run with layout.pp > 1")
    try:
        name, ranks = _measured(read_object(file))
        first, last = min(s[1] for spans in ranks for s in spans), max(s[2] for spans in ranks for s in spans)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(
            f"{file} is damaged: it holds no times of a schedule ({type(error).__name__}: {error})"
        ) from None
    lines = [f"  the last step of {folder}: {name}, {len(ranks)} ranks, {(last - first) * 1e3:.1f} ms"]
    for rank, spans in enumerate(ranks):
        busy = sum(end - begin for _, begin, end in spans)
        lines.append(
            f"  rank {rank:>2}  computed {busy * 1e3:8.1f} ms of it; waited {1 - busy / (last - first):6.1%}"
            f"  ({_means(spans)})"
        )
    return "\n".join(lines), svg_of(f"{folder}: {name}, measured", ranks)


def _measured(raw: dict[str, Any]) -> tuple[str, list[list[Span]]]:
    """Return the name of a schedule, and each rank's actions with their times."""
    times = [[(actions_in(word)[0], float(begin), float(end)) for word, begin, end in spans] for spans in raw["ranks"]]
    return str(raw["schedule"]), times


def _means(spans: list[tuple[Action, float, float]]) -> str:
    """Return the mean time of each kind of work."""
    by_work: dict[str, list[float]] = {}
    for action, begin, end in spans:
        by_work.setdefault(str(action.work), []).append(end - begin)
    return ", ".join(f"{work} {sum(times) / len(times) * 1e3:.2f} ms" for work, times in by_work.items())
