"""Simulate a schedule: when each action begins and ends, how long ranks wait, how many activations live.

Ranks take their actions in order; a forward waits for the previous stage, a backward for the next one. Messages take no
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.errors import ConfigError

from .action import Action, PipelineSchedule, Work

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


def needs(action: Action, schedule: PipelineSchedule) -> tuple[Action, ...]:
    """List the actions that must end before this one; of alternatives, the schedule contains one."""
    stage, work, m = action
    if work is Work.FORWARD:
        return (Action(stage - 1, work, m),) if stage else ()
    if work is Work.WEIGHT:
        return (Action(stage, Work.INPUT, m),)
    own = (Action(stage, Work.FORWARD, m),)
    last = stage == schedule.stages - 1
    return own if last else (*own, Action(stage + 1, Work.BACKWARD, m), Action(stage + 1, Work.INPUT, m))


def simulate(schedule: PipelineSchedule, cost: Cost = unit_cost) -> Timeline:
    """Simulate a schedule; ConfigError, naming the actions, if ranks would wait for each other forever."""
    everything = {action for actions in schedule.ranks for action in actions}
    spans: dict[Action, tuple[float, float]] = {}
    places, clocks = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                wanted = [other for other in needs(action, schedule) if other in everything]
                if any(other not in spans for other in wanted):
                    break
                begin = max([clocks[rank], *(spans[other][1] for other in wanted)])
                clocks[rank] = begin + cost(action)
                spans[action] = begin, clocks[rank]
                places[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[places[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if places[rank] < len(actions)
    ]
    if stuck:
        raise ConfigError(f"schedule {schedule.name}: the ranks would wait for each other for ever: {', '.join(stuck)}")
    makespan = max(clocks)
    busy = (sum(end - begin for begin, end in (spans[a] for a in actions)) for actions in schedule.ranks)
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
