"""Place a schedule's messages: list each rank's computations, sends and receives, in an order all ranks agree on.

A simulation of the schedule gives the places: a rank sends as soon as it has computed, and its peer begins to receive
at the same moment. So both sides of every pair of ranks name their messages in the same order, which back ends without
tags need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .action import Action, PipelineSchedule, Work
from .simulate import simulate


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
