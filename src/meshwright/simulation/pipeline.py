"""Simulate a job's pipeline by the order of its schedule: when stages compute, and what its ranks hold meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.schedule import Action, PipelineSchedule, WaitOrder, Work, read_schedule, wait_order
from meshwright.simulation.job import Job, stages_on

ROUNDS, EQUAL = 12, 1e-11
"""Rounds of microbatches, as many as there are ranks each, that are simulated at least; and the relative difference up
to which two rounds are equally long."""
WORKS = tuple(Work)
ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""Schedules without rounds."""
STEADY = 5
"""Rounds of microbatches, as many as there are ranks each, after which 1F1B, its loops and V hold no more."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on each stage of a pipeline.

    Attributes:
        backward: whole, with what ``weight`` has.
        weight: the part of the backward that a schedule may put off.
        message: between two ranks, until what one computed is there on the other.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    message: float

    def of(self, work: Work) -> tuple[float, ...]:
        """Return the seconds of a kind of action, by stage."""
        if work is Work.INPUT:
            return tuple(whole - later for whole, later in zip(self.backward, self.weight, strict=True))
        return {Work.FORWARD: self.forward, Work.BACKWARD: self.backward, Work.WEIGHT: self.weight}[work]


def schedule_of(job: Job) -> PipelineSchedule:
    """Return the order of all ranks' actions in a job's step; without a pipeline, of 1F1B on one rank."""
    if job.schedule.endswith(".csv"):
        return read_schedule(job.schedule)
    return _built(job.schedule, job.layout.pp, job.microbatches, job.execution.stages_per_rank)


def _built(schedule: str, ranks: int, microbatches: int, per_rank: int) -> PipelineSchedule:
    """Return a known schedule; where it needs more microbatches, as for published runs, with as many as it needs."""
    kind = schedule_kind(schedule)
    return kind.build(ranks, kind.legal(microbatches, ranks), per_rank)


def pipeline_spans(job: Job, stages: StageSeconds) -> list[list[tuple[Action, float, float]]]:
    """Return for each pipeline rank, or the only one, its actions in order, with their begin and end."""
    order = wait_order(schedule_of(job))
    seconds = [stages.of(work)[stage] for stage, work, _ in order.actions]
    lanes: list[list[tuple[Action, float, float]]] = [[] for _ in range(order.lanes)]
    ends = order.ends(seconds, stages.message)
    for action, rank, end, taken in zip(order.actions, order.ranks, ends, seconds, strict=True):
        begin, before = end - taken, lanes[rank][-1][2] if lanes[rank] else 0.0
        lanes[rank].append((action, begin if begin - before > EQUAL * end else before, end))
    return lanes


def pipeline_seconds(job: Job, stages: StageSeconds) -> float:
    """Return when the last action of a job's pipeline ends."""
    if job.schedule.endswith(".csv"):
        return max(end for lane in pipeline_spans(job, stages) for _, _, end in lane)
    return _makespan(job.schedule, job.layout.pp, job.microbatches, job.execution.stages_per_rank, stages)


@lru_cache(maxsize=1000)
def _makespan(schedule: str, ranks: int, microbatches: int, per_rank: int, stages: StageSeconds) -> float:
    """Return when the last action of a known schedule ends.

    Of very many microbatches, the middle ones are not simulated one by one: where every rank does all of a round as it
    did the round before, and so much later, the rounds to come are as long.
    """
    if schedule not in ALL_FORWARDS_FIRST and ROUNDS * ranks < microbatches:
        some = ROUNDS * ranks + microbatches % ranks
        short = _compact(schedule, ranks, some, per_rank)
        ends = short.ends(stages)
        shifts = [ends[later] - ends[sooner] for sooner, later in short.pairs]
        if max(shifts) - min(shifts) <= EQUAL * max(shifts):
            return max(ends) + (microbatches - some) // ranks * max(shifts)
    return max(_compact(schedule, ranks, microbatches, per_rank).ends(stages))


@dataclass(frozen=True, eq=False)
class CompactOrder:
    """An order as numbers, since a million actions as objects slow all of Python's collections of garbage.

    Attributes:
        order: with no actions.
        codes: of each action, its stage and kind of work.
        pairs: places of the actions of middle rounds, with those of the same actions one round later.
    """

    order: WaitOrder
    codes: Sequence[int]
    pairs: Sequence[tuple[int, int]]

    def ends(self, stages: StageSeconds) -> list[float]:
        table = [seconds for by_work in zip(*map(stages.of, WORKS), strict=True) for seconds in by_work]
        return self.order.ends([table[code] for code in self.codes], stages.message)


@lru_cache(maxsize=16)
def _compact(schedule: str, ranks: int, microbatches: int, per_rank: int) -> CompactOrder:
    order = wait_order(_built(schedule, ranks, microbatches, per_rank))
    numbers = {work: number for number, work in enumerate(WORKS)}
    codes = array("l", [stage * len(WORKS) + numbers[work] for stage, work, _ in order.actions])
    plain = WaitOrder(order.lanes, (), array("l", order.ranks), array("l", order.sources))
    first = (microbatches // ranks // 2 - 2) * ranks
    window = range(first, first + 4 * ranks)  # further than an order looks back
    places = {action: place for place, action in enumerate(order.actions) if action.microbatch in window}
    later = ((place, action._replace(microbatch=action.microbatch + ranks)) for action, place in places.items())
    return CompactOrder(plain, codes, [(place, places[action]) for place, action in later if action in places])


def least_pipeline_seconds(job: Job, stages: StageSeconds, among: Iterable[int] = ()) -> float:
    """Return a lower bound of ``pipeline_seconds`` by the work of some ranks (by default all).

    A rank begins when the first microbatch has reached it, cannot begin a backward before one has passed all stages,
    and its last backward has to pass the stages before it. Of 1F1B a rank waits, besides, for one microbatch's round
    trip through the stages behind it before it takes one more than there are such stages.
    """
    name, ranks, homes, microbatches = job.schedule, job.layout.pp, job.rank_of, job.microbatches
    loops = name in ("1f1b", "interleaved_1f1b")
    hops = [0, *accumulate(int(a != b) for a, b in pairwise(homes))]
    ahead, back = [0.0, *accumulate(stages.forward)], [0.0, *accumulate(stages.backward)]
    whole, message, most = ahead[-1] + hops[-1] * stages.message, stages.message, 0.0
    for rank in among or range(ranks):
        own = stages_on(homes, rank)
        first, last = own[0], own[-1]
        reaches = ahead[first] + hops[first] * message
        forward, backward = sum(stages.forward[s] for s in own), sum(stages.backward[s] for s in own)
        if not loops:
            most = max(most, reaches + microbatches * (forward + backward))
            continue
        turns = back[-1] - back[last + 1] + (hops[-1] - hops[last]) * message
        returns = back[first] + hops[first] * message
        # of its forwards before its first backward
        number = ranks - rank if len(own) == 1 else (len(own) - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        rounds, rest = divmod(min(number, microbatches * len(own)), ranks * len(own))
        before = rounds * ranks * forward
        for stage in own:
            before += min(rest, ranks) * stages.forward[stage]
            rest -= min(rest, ranks)
        least = max(whole + turns, reaches + before) + microbatches * (forward + backward) - before
        if name == "1f1b":
            trip = ahead[-1] - ahead[rank] + back[-1] - back[rank] + 2 * (ranks - 1 - rank) * message
            trips, rest = divmod(microbatches - 1, ranks - rank)
            least = max(least, reaches + (trips + 1) * trip + rest * backward)
        most = max(most, least + returns)
    return most


@dataclass(frozen=True)
class Held:
    """Microbatches of which a pipeline rank holds something at one moment, for each of its stages.

    Attributes:
        whole: between forward and backward.
        deferred: between the gradient of their input and those of the weights.
    """

    whole: tuple[int, ...]
    deferred: tuple[int, ...]


def held_on(job: Job, rank: int) -> tuple[Held, ...]:
    """Return what a pipeline rank holds at the moments of a step at which no other moment has more of everything."""
    if job.layout.pp == 1:
        return (Held((1,), (0,)),)
    if job.schedule.endswith(".csv"):
        return _fullest(read_schedule(job.schedule), rank)
    ranks, microbatches, per_rank = job.layout.pp, job.microbatches, job.execution.stages_per_rank
    if job.schedule == "1f1b":
        return (Held((min(microbatches, ranks - rank),), (0,)),)
    if job.schedule in ("interleaved_1f1b", "zbv_zero_bubble"):
        microbatches = min(microbatches, STEADY * ranks)
    return _held(job.schedule, ranks, microbatches, per_rank)[rank]


@lru_cache(maxsize=1000)
def _held(schedule: str, ranks: int, microbatches: int, per_rank: int) -> tuple[tuple[Held, ...], ...]:
    built = _built(schedule, ranks, microbatches, per_rank)
    return tuple(_fullest(built, rank) for rank in range(ranks))


def _fullest(schedule: PipelineSchedule, rank: int) -> tuple[Held, ...]:
    found = {held for moments in moments_on(schedule, rank) for held in moments}
    points = [(held, (*held.whole, *held.deferred)) for held in found]
    least = [
        held
        for held, point in points
        if not any(point != other and all(a <= b for a, b in zip(point, other, strict=True)) for _, other in points)
    ]
    return tuple(sorted(least, key=lambda held: (held.whole, held.deferred)))


def moments_on(schedule: PipelineSchedule, rank: int) -> list[tuple[Held, Held]]:
    """Return what a rank holds as each of its actions begins, its own microbatch included, and when it has ended."""
    stages = schedule.stages_on(rank)
    whole, deferred = [0] * len(stages), [0] * len(stages)
    found = []
    for action in schedule.ranks[rank]:
        place = stages.index(action.stage)
        begins = Held(tuple(whole), tuple(deferred))
        if action.work is Work.FORWARD:
            whole[place] += 1
        elif action.work is Work.WEIGHT:
            deferred[place] -= 1
        else:
            whole[place] -= 1
            deferred[place] += action.work is Work.INPUT
        found.append((begins, Held(tuple(whole), tuple(deferred))))
    return found
