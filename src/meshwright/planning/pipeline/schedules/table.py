"""Read and write schedules as CSV tables with a row per rank and a cell per action, as torch's schedules do."""

from __future__ import annotations

import csv
from pathlib import Path

from meshwright.core.errors import ConfigError

from .action import Action, PipelineSchedule, actions_in
from .simulate import check_whole

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
