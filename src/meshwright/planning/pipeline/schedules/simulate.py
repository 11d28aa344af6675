"""Simulate a schedule: when each action begins and ends, how long ranks wait, how many activations live.

Ranks take their actions in order; a forward waits for the previous stage, a backward for the next one, and for the
message between them, if it has a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

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
