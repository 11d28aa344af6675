"""Run the steps of all ranks against each other: messages begin when the last of their ranks has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.errors import IntegrityError

Key = tuple[object, ...]
Rate = Callable[[int, float], tuple[float, float]]
"""(ranks that compute, cores that messages occupy) -> speed of ranks, speed of messages."""
EPSILON = 1e-15


@dataclass(frozen=True)
class Compute:
    """Seconds of work on a core of its own."""

    seconds: float


@dataclass(frozen=True)
class Begin:
    """The begin of a message: all ranks that name ``key`` for the n-th time take part in its n-th message.

    Attributes:
        number: the message's number on this rank.
        key: what the message is matched by; messages with equal ``queue`` travel one after the other.
        needs: ranks that must have come.
        seconds: seconds in which it travels.
    """

    number: int
    key: Key
    needs: int
    seconds: float
    queue: Key


@dataclass(frozen=True)
class Await:
    """The place where a rank waits for a message that it began."""

    number: int


Item = Compute | Begin | Await


@dataclass
class Waited:
    """A rank's seconds: when it ended, computing (stretched where cores are shared), and waiting by message."""

    end: float = 0.0
    computing: float = 0.0
    waiting: dict[Key, float] = field(default_factory=dict)


@dataclass
class _Travelling:
    key: Key
    queue: Key
    needs: int
    left: float
    arrived: int = 0
    is_done: bool = False


@dataclass
class _RankState:
    items: Sequence[Item]
    place: int = 0
    left: float = 0.0
    awaits: _Travelling | None = None
    begun: dict[int, _Travelling] = field(default_factory=dict)
    uses: dict[Key, int] = field(default_factory=dict)
    is_done: bool = False


def alone(computing: int, travelling: float) -> tuple[float, float]:
    """Rate of ranks and messages that disturb nobody."""
    return 1.0, 1.0


def run(steps: Mapping[int, Sequence[Item]], rate: Rate = alone, busy: float = 0.0) -> dict[int, Waited]:
    """Simulate the ranks, and return each one's seconds.

    Args:
        busy: cores that each rank of a message occupies while it travels.

    Raises:
        IntegrityError: ranks wait for messages that others never begin.
    """
    return _Simulation(steps, rate, busy).run()


class _Simulation:
    def __init__(self, steps: Mapping[int, Sequence[Item]], rate: Rate, busy: float):
        self.states = {rank: _RankState(items) for rank, items in steps.items()}
        self.found = {rank: Waited() for rank in steps}
        self.rate, self.busy, self.now = rate, busy, 0.0
        self.messages: dict[Key, _Travelling] = {}
        self.queues: dict[Key, list[_Travelling]] = {}

    def run(self) -> dict[int, Waited]:
        for rank in self.states:
            self._advance(rank)
        while not all(state.is_done for state in self.states.values()):
            self._pass_time()
        return self.found

    def _pass_time(self) -> None:
        """Go to the next moment at which a rank has computed or a message has travelled."""
        computing = [rank for rank, state in self.states.items() if state.left > 0]
        travelling = [queue[0] for queue in self.queues.values() if queue]
        if not computing and not travelling:
            stuck = {rank: state.awaits.key for rank, state in self.states.items() if state.awaits is not None}
            raise IntegrityError(f"ranks wait for messages that others never begin: {stuck}")
        ranks, messages = self.rate(len(computing), self.busy * sum(one.needs for one in travelling))
        ends = [self.states[rank].left / ranks for rank in computing] + [one.left / messages for one in travelling]
        passed = max(0.0, min(ends))
        self.now += passed
        for rank, state in self.states.items():
            if state.awaits is not None:
                waiting = self.found[rank].waiting
                waiting[state.awaits.key[:2]] = waiting.get(state.awaits.key[:2], 0.0) + passed
        for one in travelling:
            one.left -= passed * messages
            if one.left <= EPSILON:
                one.is_done = True
                self.queues[one.queue].pop(0)
        for rank in computing:
            state = self.states[rank]
            state.left -= passed * ranks
            self.found[rank].computing += passed
            if state.left <= EPSILON:
                state.left = 0.0
                self._advance(rank)
        for rank, state in self.states.items():
            if state.awaits is not None and state.awaits.is_done:
                state.awaits = None
                self._advance(rank)

    def _advance(self, rank: int) -> None:
        """Go on to what takes time, or to a message that has not ended."""
        state = self.states[rank]
        while state.place < len(state.items):
            item = state.items[state.place]
            state.place += 1
            if isinstance(item, Compute):
                if item.seconds > 0:
                    state.left = item.seconds
                    return
            elif isinstance(item, Begin):
                self._begin(state, item)
            else:
                message = state.begun.pop(item.number, None)
                if message is not None and not message.is_done:
                    state.awaits = message
                    return
        state.is_done = True
        self.found[rank].end = self.now

    def _begin(self, state: _RankState, item: Begin) -> None:
        use = state.uses[item.key] = state.uses.get(item.key, 0) + 1
        key = (*item.key, use)
        message = self.messages.get(key)
        if message is None:
            message = self.messages[key] = _Travelling(key, item.queue, item.needs, item.seconds)
        message.arrived += 1
        message.left = max(message.left, item.seconds)
        if message.arrived == message.needs:
            self.queues.setdefault(message.queue, []).append(message)
        state.begun[item.number] = message
