"""What a pipeline rank does at a time: the forward or backward of one stage on one microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Work(StrEnum):
    """The letters are those of torch's schedules. A backward is done whole (B), or as I and, later, W (arXiv 2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    INPUT = "I"
    """The gradient of the stage's input."""
    WEIGHT = "W"
    """The gradients of the stage's weights, from what I kept."""


class Action(NamedTuple):
    """Written as torch writes it: ``2F5`` is the forward of stage 2 on microbatch 5."""

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.microbatch}"


_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")


def actions_in(text: str) -> list[Action]:
    """The actions that a cell of a schedule's table holds: none, one, or two that torch would overlap, in their order.

    Raises:
        ValueError: it holds something else.
    """
    found = [Action(int(stage), Work(work), int(microbatch)) for stage, work, microbatch in _WRITTEN.findall(text)]
    if _WRITTEN.sub("", text).replace("OVERLAP_F_B", "").strip(" ();"):
        raise ValueError(f"{text!r} is no action: write stage, one of F B I W, and microbatch, such as 0F3")
    return found


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of every rank's actions.

    Attributes:
        name: in our words.
        ranks: by rank of the pipeline axis, its actions in order.
        rank_of: by stage, the rank that has it.
        microbatches: of a step.
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
