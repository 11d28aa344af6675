"""Forecast the seconds of a step from the recorded steps of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.simulation.measured import MachineProfile

from .events import Await, Begin, Compute, Item, Rate, run
from .operators import MessageBegin, MessageWait, OperatorWork, StepOfRank
from .pricing import OperatorPrices, Spent
from .profile import InSteps, StepProfile


@dataclass(frozen=True)
class RankSeconds:
    """A rank's seconds of a step.

    Attributes:
        seconds: when the rank has done its step.
        parts: seconds of its operators by what they are spent on, each on a core of its own.
        sharing: seconds by which shared cores make them longer.
        waiting: seconds in which it waits for messages, by kind and ranks: their travel, and waiting for peers.
        messages: number of messages that it begins.
    """

    seconds: float
    parts: dict[Spent, float] = field(default_factory=dict)
    sharing: float = 0.0
    waiting: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)
    messages: int = 0


@dataclass(frozen=True)
class StepForecast:
    """The seconds of a step, which ends when the last rank does, and those of each rank."""

    ranks: dict[int, RankSeconds]

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks.values())

    @property
    def slowest(self) -> int:
        """The rank that waits least, whose work the others wait for."""
        return min(self.ranks, key=lambda rank: (sum(self.ranks[rank].waiting.values()), rank))


def forecast_step(steps: Sequence[StepOfRank], profile: StepProfile, others: float = 0.0) -> StepForecast:
    """Forecast a step of all ranks on a machine like the one that was measured.

    Args:
        others: cores of the host that other programs occupy meanwhile.

    Raises:
        ConfigError: the profile lacks a dtype, or messages.
        IntegrityError: the ranks' messages do not match.
    """
    prices = OperatorPrices(profile)
    items, parts = {}, {}
    for step in steps:
        items[step.rank], parts[step.rank] = _priced(step, prices, profile.in_steps)
    found = run(items, _sharing(profile, others), profile.busy)
    return StepForecast(
        {
            step.rank: RankSeconds(
                found[step.rank].end,
                parts[step.rank],
                found[step.rank].computing - sum(parts[step.rank].values()),
                {(str(kind), _ranks(ranks)): s for (kind, ranks), s in found[step.rank].waiting.items()},
                sum(isinstance(event, MessageBegin) for event in step.events),
            )
            for step in steps
        }
    )


def _ranks(value: object) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else ()


def _priced(step: StepOfRank, prices: OperatorPrices, slower: InSteps) -> tuple[list[Item], dict[Spent, float]]:
    """Turn a rank's events into seconds; work between two messages is one item."""
    items: list[Item] = []
    parts = dict.fromkeys(Spent, 0.0)
    seconds, around = 0.0, prices.profile.host.get("message", 0.0)
    for event in step.events:
        if isinstance(event, OperatorWork):
            price = prices.price(event)
            computing, host = slower.computing * price.computing, slower.host * price.host
            parts[price.spent] += computing
            parts[Spent.HOST] += host
            seconds += computing + host
            continue
        if isinstance(event, MessageBegin) and len(event.ranks) < 2:
            continue  # to oneself
        if isinstance(event, MessageBegin):
            parts[Spent.HOST] += around
            seconds += around
        items.append(Compute(seconds))
        seconds = 0.0
        items.append(
            Await(event.number) if isinstance(event, MessageWait) else _begin(event, prices.profile, slower.message)
        )
    return [*items, Compute(seconds)], parts


def _begin(event: MessageBegin, profile: MachineProfile, later: float) -> Begin:
    if event.is_between_two:
        return Begin(
            event.number,
            ("send", event.ranks, event.tag),
            2,
            profile.message_s("send", event.moved, 2) + later,
            ("send", event.ranks),
        )
    kind = event.kind if event.kind in KINDS else "all_reduce"
    seconds = profile.message_s(kind, event.moved, len(event.ranks)) + later
    return Begin(event.number, (event.kind, event.ranks), len(event.ranks), seconds, (event.ranks,))


LEAST_LEFT = 0.05
"""Share of a host's cores that other programs leave at least."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def _sharing(profile: StepProfile, others: float) -> Rate:
    """Return how fast ranks and messages of one host are, by what they want of its cores."""
    speeds, slots = profile.crowding, profile.slots
    left = max(LEAST_LEFT * slots, slots - others / profile.threads)

    def at(load: float) -> float:
        """Return the speed of a rank among so many; beyond those measured all share what there is."""
        if load >= len(speeds):
            return speeds[-1] * min(1.0, max(slots, len(speeds)) / load)
        low = max(1, int(load))
        share = max(0.0, load - low)
        return (1 - share) * speeds[low - 1] + share * speeds[low]

    def rate(computing: int, travelling: float) -> tuple[float, float]:
        load = computing + travelling
        if load <= 0:
            return 1.0, 1.0
        beside = min(1.0, left / load) / min(1.0, slots / load)
        return at(max(load, 1.0)) * beside, min(1.0, left / load)

    return rate
