"""Order the actions of the known schedules, for any number of ranks and microbatches.

gpipe                    GPipe (arXiv 1811.06965): all forwards, then all backwards
1f1b                     PipeDream-Flush (arXiv 2006.09503), as in Megatron-LM (arXiv 2104.04473)
interleaved_1f1b         several stages per rank, in loops (arXiv 2104.04473)
looped_bfs               breadth-first loops (arXiv 2211.05953)
interleaved_zero_bubble  interleaved, with weight gradients in the bubbles (ZB-H1 of arXiv 2401.10241)
zbv_zero_bubble          two stages per rank in the shape of a V (arXiv 2405.15362)
dualpipe_v               DualPipe (arXiv 2412.19437) cut in half, in the shape of a V
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from meshwright.core.errors import ConfigError, nearest
from meshwright.planning.pipeline.schedule import Action, PipelineSchedule, Work, simulate, unit_cost

Order = Callable[[int, int, int, int], list[Action]]
"""(rank, ranks, microbatches, stages per rank) -> that rank's actions."""


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule by name.

    Attributes:
        order: function that orders the actions of one rank.
        loops: whether a rank may have several stages, ``ranks`` apart; else one, or (``is_v``) two.
        is_v: whether rank r has the stages r and 2 · ranks - 1 - r.
        splits_backward: whether input and weight gradients are computed apart.
        multiple: (ranks) -> the number microbatches must be a multiple of.
        least: (ranks) -> the least number of microbatches.
    """

    name: str
    order: Order
    loops: bool = False
    is_v: bool = False
    splits_backward: bool = False
    multiple: Callable[[int], int] = lambda ranks: 1
    least: Callable[[int], int] = lambda ranks: 1

    def legal(self, microbatches: int, ranks: int) -> int:
        """Return the least number of microbatches, from ``microbatches`` up, that the schedule can do."""
        step = self.multiple(ranks)
        return max(-(-microbatches // step) * step, self.least(ranks))

    def per_rank(self, blocks: int, ranks: int) -> int:
        """Choose stages per rank by default: two where loops are possible and the blocks suffice, else one."""
        return 2 if self.is_v or (self.loops and blocks >= 2 * ranks) else 1

    def rank_of(self, ranks: int, per_rank: int) -> tuple[int, ...]:
        stages = range(ranks * per_rank)
        return (
            tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in stages)
            if self.is_v
            else tuple(s % ranks for s in stages)
        )

    def build(self, ranks: int, microbatches: int, per_rank: int) -> PipelineSchedule:
        """Build the schedule; ConfigError if it does not exist for this number of microbatches."""
        if (legal := self.legal(microbatches, ranks)) != microbatches or microbatches < 1:
            raise ConfigError(
                f"schedule {self.name} on {ranks} ranks: {microbatches} microbatches cannot be scheduled; the next"
                f" that can are {legal}"
            )
        orders = tuple(tuple(self.order(rank, ranks, microbatches, per_rank)) for rank in range(ranks))
        made = PipelineSchedule(self.name, orders, self.rank_of(ranks, per_rank), microbatches)
        return with_weight_gradients(made) if self.splits_backward and not self.is_v else made


def _looped(rank: int, ranks: int, microbatches: int, per_rank: int, *, backward: Work) -> list[Action]:
    """Order a rank whose microbatches go through the loops ``ranks`` at a time.

    Some forwards, then one forward and one backward in turns, then the remaining backwards.
    """
    rounds = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    stages = [loop * ranks + rank for loop in range(per_rank)]
    forwards = [Action(stage, Work.FORWARD, m) for group in rounds for stage in stages for m in group]
    backwards = [Action(stage, backward, m) for group in rounds for stage in reversed(stages) for m in group]
    ahead = (ranks - 1 - rank) * (2 if per_rank > 1 and backward is Work.BACKWARD else 1)
    ahead = min((per_rank - 1) * ranks + ahead, len(forwards))
    order = forwards[:ahead]
    for number, action in enumerate(backwards):
        order += [*forwards[ahead + number : ahead + number + 1], action]
    return order


def _breadth_first(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order all forwards, then all backwards, of one stage after the other."""
    stages = [loop * ranks + rank for loop in range(per_rank)]
    forwards = [Action(stage, Work.FORWARD, m) for stage in stages for m in range(microbatches)]
    return forwards + [Action(stage, Work.BACKWARD, m) for stage in reversed(stages) for m in range(microbatches)]


class _Rank:
    """The actions of one rank of a V so far; those beyond the last microbatch are left out."""

    def __init__(self, rank: int, ranks: int, microbatches: int):
        self.stages = rank, 2 * ranks - 1 - rank
        self.microbatches = microbatches
        self.done: Counter[tuple[int, Work]] = Counter()
        self.order: list[Action] = []

    def do(self, leg: int, *works: Work) -> None:
        """Act on the next microbatch of the way down (0) or up (1)."""
        for work in works:
            number = self.done[leg, work]
            self.done[leg, work] += 1
            if number < self.microbatches:
                self.order.append(Action(self.stages[leg], work, number))


def _zbv(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    F, I, W = Work.FORWARD, Work.INPUT, Work.WEIGHT  # noqa: E741
    here = _Rank(rank, ranks, microbatches)
    for _ in range(2 * (ranks - rank) - 1):
        here.do(0, F)
    for _ in range(rank):
        here.do(1, F)
        here.do(0, F)
    for _ in range(ranks - rank):
        here.do(1, F, I, W)
    while here.done[1, F] < max(here.done[0, F], microbatches):
        if here.done[0, F] < microbatches:
            here.do(0, F)
        here.do(0, I, W)
        here.do(1, F, I, W)
    for _ in range(rank):
        here.do(0, I)
        here.do(1, I)
    for _ in range(ranks - rank):
        here.do(0, I, W)
    for leg in (1, 0):
        while here.done[leg, W] < here.done[leg, I]:
            here.do(leg, W)
    return here.order


def _dualpipe_v(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.INPUT, Work.WEIGHT  # noqa: E741
    here, behind = _Rank(rank, ranks, microbatches), ranks - 1 - rank
    pending: list[Action] = []

    def backward(leg: int, *, split: bool) -> None:
        number = here.done[leg, B]
        here.done[leg, B] += 1
        here.order.append(Action(here.stages[leg], I if split else B, number))
        if split:
            pending.append(Action(here.stages[leg], W, number))

    def weight() -> None:
        if pending:
            here.order.append(pending.pop(0))

    for _ in range(2 * behind):
        here.do(0, F)
    for _ in range(rank + 1):
        here.do(0, F)
        here.do(1, F)
    for _ in range(behind):
        backward(1, split=True)
        weight()
        here.do(1, F)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        here.do(0, F)
        backward(1, split=False)
        here.do(1, F)
        backward(0, split=False)
    for _ in range(behind):
        backward(1, split=False)
        here.do(1, F)
        backward(0, split=False)
    for turn in range(rank + 1):  # its second half defers weight gradients to the coming bubbles
        backward(1, split=2 * turn >= rank + 1)
        backward(0, split=2 * turn + 1 >= rank + 1)
    for _ in range(behind):
        weight()
        backward(0, split=True)
    here.order += pending
    return here.order


def with_weight_gradients(schedule: PipelineSchedule) -> PipelineSchedule:
    """Add W to an order that has only F and I: each rank defers the first few, and does the rest as it goes.

    Later ranks defer more. The deferred number is the one with the shortest total time if F, I and W take equal time.
    """
    per_rank = schedule.stages // len(schedule.ranks)
    tried = []
    for delay in range(2 * per_rank + 1):
        orders = []
        for rank, actions in enumerate(schedule.ranks):
            made: list[Action] = []
            pending: list[Action] = []
            for action in actions:
                made.append(action)
                if action.work is Work.INPUT:
                    pending.append(action._replace(work=Work.WEIGHT))
                    if len(pending) > delay * rank:
                        made.append(pending.pop(0))
            orders.append((*made, *pending))
        tried.append(replace(schedule, ranks=tuple(orders)))
    return min(tried, key=lambda made: simulate(made, unit_cost).makespan)


def forwards(rank_of: tuple[int, ...], microbatches: int) -> PipelineSchedule:
    """Order forwards alone: every rank takes all microbatches through one of its stages, then the next."""
    ranks = range(1 + max(rank_of))
    orders = tuple(
        tuple(
            Action(stage, Work.FORWARD, m)
            for stage, home in enumerate(rank_of)
            if home == rank
            for m in range(microbatches)
        )
        for rank in ranks
    )
    return PipelineSchedule("forwards", orders, rank_of, microbatches)


KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", _breadth_first),
        ScheduleKind("1f1b", partial(_looped, backward=Work.BACKWARD)),
        ScheduleKind(
            "interleaved_1f1b", partial(_looped, backward=Work.BACKWARD), loops=True, multiple=lambda ranks: ranks
        ),
        ScheduleKind("looped_bfs", _breadth_first, loops=True),
        ScheduleKind(
            "interleaved_zero_bubble",
            partial(_looped, backward=Work.INPUT),
            loops=True,
            splits_backward=True,
            multiple=lambda ranks: ranks,
        ),
        ScheduleKind("zbv_zero_bubble", _zbv, is_v=True, splits_backward=True),
        ScheduleKind("dualpipe_v", _dualpipe_v, is_v=True, splits_backward=True, least=lambda ranks: 2 * ranks),
    )
}


def _squeezed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").removeprefix("schedule")


def schedule_kind(name: str) -> ScheduleKind:
    """Find a schedule by our name or torch's (``Interleaved1F1B``, ``ScheduleZBVZeroBubble``), else ConfigError."""
    found = next((kind for kind in KINDS.values() if _squeezed(kind.name) == _squeezed(name)), None)
    if found is None:
        raise ConfigError(
            f"techniques.pipeline_schedule = {name!r}: legal are {', '.join(KINDS)}, or a .csv file of"
            f" actions.{nearest(name, KINDS)}"
        )
    return found
