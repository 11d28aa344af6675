"""Write a schedule as torch's table, which ``read_schedule`` and torch read."""

from __future__ import annotations

import csv
from pathlib import Path

from meshwright.planning.pipeline.schedule import PipelineSchedule


def write_schedule(schedule: PipelineSchedule, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows([str(action) for action in actions] for actions in schedule.ranks)
