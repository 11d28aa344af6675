"""Messages of attention over cut rows are begun before, and waited for behind, what hides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.distributed.context import kernels, methods
from meshwright.distributed.context.methods import Context, attend
from meshwright.distributed.context.rows import Reaches, cut_rows
from meshwright.distributed.exchange import Thread, on_threads
from meshwright.introspection.mixing.arithmetic import Arithmetic
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.masks import RowMask, causal, shorter_than
from meshwright.planning.context.plan import Kind, Method


class Recording(Thread):
    """A rank that notes when its messages begin, and when they are waited for."""

    def __init__(self, thread: Thread, events: list[str]):
        super().__init__(thread.board, thread.rank)
        self.events, self.messages_sent = events, 0

    def _noted(self, begin: Callable[[], Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
        number, self.messages_sent = self.messages_sent, self.messages_sent + 1
        self.events.append(f"send {number}")
        finish = begin()

        def wait() -> torch.Tensor:
            self.events.append(f"wait {number}")
            return finish()

        return wait

    def begin_gather(self, x: Any) -> Any:
        return self._noted(lambda: super(Recording, self).begin_gather(x))

    def begin_scatter(self, parts: Any) -> Any:
        return self._noted(lambda: super(Recording, self).begin_scatter(parts))

    def begin_trade(self, x: Any, sends: Any, receives: Any) -> Any:
        return self._noted(lambda: super(Recording, self).begin_trade(x, sends, receives))

    def pass_on(self, x: Any, elements: int, shift: int = 1) -> Any:
        return self._noted(lambda: super(Recording, self).pass_on(x, elements, shift))


def order_of_calls(monkeypatch: pytest.MonkeyPatch, kind: Kind, ranks: int) -> tuple[list[str], list[str]]:
    """What the first rank does in the forward, and in the backward."""
    events: list[list[str]] = [[] for _ in range(ranks)]
    running: list[int] = []  # one thread computes at a time
    add, found = kernels.Attended.add, kernels.gradients_of

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            events[running[-1]].append(name)
            return function(*given, **options)

        return run

    monkeypatch.setattr(kernels.Attended, "add", noted("attend", add))
    monkeypatch.setattr(methods, "gradients_of", noted("differentiate", found))
    meet = type(on_threads.__globals__["Board"](1)).meet

    def meet_and_note(board: Any) -> None:
        mine = running[-1]
        meet(board)
        running.append(mine)

    monkeypatch.setattr("meshwright.distributed.exchange.Board.meet", meet_and_note)

    def job(thread: Thread) -> int:
        running.append(thread.rank)
        group = Recording(thread, events[thread.rank])
        rows = cut_rows({"tokens": torch.zeros(1, 48)}, ranks, group.rank)
        x = torch.randn(1, 2, rows.counts[group.rank], 4, dtype=torch.float64, requires_grad=True)
        mask = RowMask(shorter_than(causal, 9) if kind == "halo" else causal)
        reach = Reaches(group).of(mask, rows, 1)
        assert reach is not None
        call = AttentionCall(x, x, x, None, True, lambda *given: given[0])
        output = attend(call, Context(group, rows, reach), Arithmetic(), Method(kind))
        forward = len(events[group.rank])
        output.sum().backward()
        return forward

    split = on_threads(ranks, job)[0]
    return events[0][:split], events[0][split:]


@pytest.mark.parametrize("kind", ["all_gather", "halo"])
def test_others_keys_travel_while_a_ranks_own_are_attended_to(monkeypatch, kind):
    forward, backward = order_of_calls(monkeypatch, kind, 3)
    assert forward == ["send 0", "attend", "wait 0", "attend"]
    assert backward == ["differentiate", "send 1", "differentiate", "wait 1"]


def test_a_rings_parts_and_sums_travel_behind_blocks(monkeypatch):
    forward, backward = order_of_calls(monkeypatch, "ring", 4)
    assert forward == [
        *("send 0", "attend", "wait 0"),
        *("send 1", "attend", "wait 1"),
        *("send 2", "attend", "wait 2"),
        "attend",
    ]
    assert backward == [
        *("send 3", "differentiate", "wait 3"),
        *("send 4", "differentiate", "send 5", "wait 4"),  # 5: the sums of the first part that passes
        *("send 6", "differentiate", "wait 5", "send 7", "wait 6"),
        *("differentiate", "wait 7", "send 8", "wait 8"),  # home
    ]


def test_a_message_that_is_waited_for_at_once_is_seen(monkeypatch):
    begin = methods.Gathered.begin_fetch

    def at_once(exchange: Any, x: Any) -> Any:
        arrived = begin(exchange, x)()
        return lambda: arrived

    monkeypatch.setattr(methods.Gathered, "begin_fetch", at_once)
    forward, _ = order_of_calls(monkeypatch, "all_gather", 2)
    assert forward == ["send 0", "wait 0", "attend", "attend"]
