"""Define a pipeline rank's action: the forward or backward of one stage on one microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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
