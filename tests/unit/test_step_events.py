"""The simulation of ranks and messages, exact on made-up steps, and prices by made-up profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_machine_profile import made_up

from meshwright.core.errors import IntegrityError
from meshwright.planning.step.operators import (
    MessageBegin,
    MessageWait,
    OperatorKind,
    OperatorWork,
    Phase,
    StepOfRank,
)
from meshwright.simulation.hardware.measured import ProfileCurves
from meshwright.simulation.hardware.profile import InSteps
from meshwright.simulation.operators import events
from meshwright.simulation.operators.answer import figures, text
from meshwright.simulation.operators.events import Await, Begin, Compute, Item
from meshwright.simulation.operators.forecast import forecast_step
from meshwright.simulation.operators.pricing import OperatorPrices, Spent
from meshwright.training.measuring.in_steps import _explained


def gather(number: int, seconds: float = 3.0, ranks: tuple[int, ...] = (0, 1)) -> Begin:
    return Begin(number, ("all_gather", ranks), len(ranks), seconds, (ranks,))


def passed(number: int, source: int, target: int, seconds: float, tag: int = 0) -> Begin:
    return Begin(number, ("send", (source, target), tag), 2, seconds, ("send", (source, target)))


def ends(steps: dict[int, list[Item]], **options) -> dict[int, float]:
    return {rank: found.end for rank, found in events.run(steps, **options).items()}


# --- events


def test_a_message_begins_when_the_last_rank_has_come():
    steps: dict[int, list[Item]] = {
        0: [Compute(1.0), gather(1), Await(1), Compute(1.0)],
        1: [Compute(5.0), gather(1), Await(1), Compute(2.0)],
    }
    assert ends(steps) == {0: 9.0, 1: 10.0}
    found = events.run(steps)
    assert found[0].waiting == {("all_gather", (0, 1)): 7.0} and found[1].waiting == {("all_gather", (0, 1)): 3.0}
    assert (found[0].computing, found[1].computing) == (2.0, 7.0)


def test_a_message_that_is_awaited_at_once_hides_nothing():
    """A simulation that let messages run behind later work whatever the code awaits would end at 5."""
    at_once: list[Item] = [Compute(1.0), gather(1), Await(1), Compute(4.0)]
    assert ends({0: at_once, 1: at_once}) == {0: 8.0, 1: 8.0}


def test_a_message_that_is_awaited_later_runs_behind_the_work_between():
    later: list[Item] = [Compute(1.0), gather(1), Compute(2.0), Await(1), Compute(4.0)]
    assert ends({0: later, 1: later}) == {0: 8.0, 1: 8.0}
    longer: list[Item] = [Compute(1.0), gather(1), Compute(5.0), Await(1), Compute(4.0)]
    assert ends({0: longer, 1: longer}) == {0: 10.0, 1: 10.0}


def test_messages_of_one_group_travel_one_after_the_other():
    both: list[Item] = [gather(1), gather(2), Await(1), Await(2)]
    assert ends({0: both, 1: both}) == {0: 6.0, 1: 6.0}
    apart: list[Item] = [gather(1), gather(2, ranks=(0, 1, 2)), Await(1), Await(2)]
    third: list[Item] = [gather(1, ranks=(0, 1, 2)), Await(1)]
    assert ends({0: apart, 1: apart, 2: third}) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_sends_are_matched_by_ranks_tag_and_order():
    """The receiver asks for the second message first; by order alone it would get the first one."""
    sender: list[Item] = [Compute(1.0), passed(1, 0, 1, 1.0, tag=7), Compute(4.0), passed(2, 0, 1, 1.0, tag=8)]
    receiver: list[Item] = [passed(1, 0, 1, 1.0, tag=8), passed(2, 0, 1, 1.0, tag=7), Await(2), Await(1)]
    assert ends({0: sender, 1: receiver})[1] == 6.0
    swapped: list[Item] = [passed(1, 0, 1, 1.0, tag=8), passed(2, 0, 1, 1.0, tag=7), Await(2)]
    assert ends({0: sender, 1: swapped})[1] == 2.0


def test_a_pipeline_has_the_bubble_of_its_order():
    """GPipe of two ranks and two microbatches: forwards of 1, backwards of 2, messages in no time."""
    first: list[Item] = [Compute(1.0), passed(1, 0, 1, 0.0, 0), Compute(1.0), passed(2, 0, 1, 0.0, 1)]
    first += [passed(3, 1, 0, 0.0, 0), Await(3), Compute(2.0), passed(4, 1, 0, 0.0, 1), Await(4), Compute(2.0)]
    second: list[Item] = [passed(1, 0, 1, 0.0, 0), Await(1), Compute(1.0), passed(2, 0, 1, 0.0, 1), Await(2)]
    second += [Compute(1.0), Compute(2.0), passed(3, 1, 0, 0.0, 0), Compute(2.0), passed(4, 1, 0, 0.0, 1)]
    found = events.run({0: first, 1: second})
    assert (found[0].end, found[1].end) == (9.0, 7.0)
    assert sum(found[0].waiting.values()) == 3.0


def test_ranks_share_cores():
    """Two ranks of one core: each computes at half speed while both do."""

    def one_core(computing: int, travelling: float) -> tuple[float, float]:
        load = computing + travelling
        return min(1.0, 1 / load) if load else 1.0, 1.0

    assert ends({0: [Compute(1.0)], 1: [Compute(3.0)]}, rate=one_core) == {0: 2.0, 1: 4.0}
    busy: list[Item] = [gather(1, 2.0), Compute(1.0), Await(1)]
    assert ends({0: busy, 1: busy}, rate=one_core, busy=1.0) == {0: 3.0, 1: 3.0}, "a message takes cores too"


def test_ranks_that_wait_for_ever_are_refused():
    with pytest.raises(IntegrityError, match="that others never begin"):
        events.run({0: [gather(1), Await(1)], 1: [Compute(1.0)]})


# --- prices


def product(dims: tuple[int, int, int, int], layout: str = "nt") -> OperatorWork:
    return OperatorWork("aten.mm", OperatorKind.PRODUCT, Phase.FORWARD, 0.0, "float32", layout, dims)


def test_operators_are_priced_by_their_curves():
    profile = made_up()
    profile = replace(profile, host={**profile.host, "forward": 5e-6, "backward": 7e-6, "dtensor": 9e-6, "fsdp": 1e-4})
    prices = OperatorPrices(ProfileCurves(profile))
    found = prices.price(product((100, 100, 100, 3)))
    assert (found.host, found.spent) == (5e-6, Spent.PRODUCTS) and found.computing == pytest.approx(3 * 2e6 / 1e9)
    view = prices.price(OperatorWork("aten.view", OperatorKind.VIEW, Phase.BACKWARD))
    assert view.seconds == pytest.approx(7e-6 + 1e-6)
    moved = prices.price(OperatorWork("aten.add", OperatorKind.POINTWISE, Phase.FORWARD, 1e6))
    assert moved.seconds == pytest.approx(1e-3 + 5e-6) and moved.computing == pytest.approx(1e-3 - 1e-6)
    assert prices.price(OperatorWork("x", OperatorKind.DTENSOR, Phase.STEP)).seconds == pytest.approx(9e-6)
    copies = OperatorWork("fsdp.chunk_cat", OperatorKind.POINTWISE, Phase.BACKWARD, 10.0)
    assert prices.price(copies).seconds == pytest.approx(1e-4 + 7e-6 + 1e-6)


def test_attention_that_masks_nothing_costs_both_halves():
    prices = OperatorPrices(ProfileCurves(made_up()))
    causal = OperatorWork(
        "sdpa", OperatorKind.ATTENTION, Phase.STEP, 0.0, "float32", "forward", (200, 200, 16, 5), causal=True
    )
    assert prices.price(causal).computing == pytest.approx(5 * 4e-3)
    assert prices.price(replace(causal, causal=False)).computing == pytest.approx(10 * 4e-3)
    assert causal.flops == 2 * 2.0 * 200 * 200 * 16 * 5 / 2


# --- both


def test_a_step_is_forecast_from_its_events():
    gathers = MessageBegin(1, "all_gather", (0, 1), 1e6)
    step = (product((100, 100, 100, 1)), gathers, MessageWait(1), product((100, 100, 100, 2)))
    profile = replace(made_up(), host={**made_up().host, "forward": 0.0, "message": 1e-4})
    forecast = forecast_step([StepOfRank(rank, step) for rank in (0, 1)], profile)
    assert forecast.seconds == pytest.approx(3 * 2e-3 + 2e-3 + 1e-4)
    assert forecast.ranks[1].waiting == {("all_gather", (0, 1)): pytest.approx(2e-3)}
    assert forecast.ranks[0].parts[Spent.PRODUCTS] == pytest.approx(6e-3) and forecast.ranks[0].messages == 1
    assert figures(forecast)["ranks"]["0"]["waiting in all_gather of 2"] == pytest.approx(2e-3)
    assert "8.1 ms a step" in text(forecast)


def test_messages_to_oneself_take_no_time():
    alone = (MessageBegin(1, "all_reduce", (0,), 1e6), MessageWait(1))
    assert forecast_step([StepOfRank(0, alone)], made_up()).seconds == 0.0


def test_crowded_ranks_compute_longer():
    profile = replace(made_up(), crowding=(1.0, 0.5), slots=1, host={**made_up().host, "forward": 0.0})
    steps = [StepOfRank(rank, (product((100, 100, 100, 1)),)) for rank in (0, 1)]
    found = forecast_step(steps, profile)
    assert found.seconds == pytest.approx(4e-3) and found.ranks[0].sharing == pytest.approx(2e-3)
    assert forecast_step(steps[:1], profile).seconds == pytest.approx(2e-3)


def test_other_programs_leave_fewer_cores():
    profile = replace(made_up(), host={**made_up().host, "forward": 0.0})
    steps = [StepOfRank(rank, (product((100, 100, 100, 1)),)) for rank in (0, 1)]
    assert forecast_step(steps, profile).seconds == pytest.approx(2e-3)
    assert forecast_step(steps, profile, others=1.0).seconds == pytest.approx(4e-3)
    assert forecast_step(steps[:1], profile, others=1.0).seconds == pytest.approx(2e-3), "one core is left"


def mostly(products: int, messages: int, views: int = 0) -> tuple[StepOfRank, ...]:
    """Steps of two ranks with so many products, messages and views."""
    sent = [
        event
        for number in range(1, messages + 1)
        for event in (MessageBegin(number, "all_gather", (0, 1), 1e3), MessageWait(number))
    ]
    host = (OperatorWork("aten.view", OperatorKind.VIEW, Phase.FORWARD),) * views
    return tuple(StepOfRank(rank, (*(product((100, 100, 100, 1)),) * products, *host, *sent)) for rank in (0, 1))


def test_work_and_messages_take_longer_in_a_step():
    (step,) = [mostly(2, 3)]
    alone = forecast_step(step, made_up()).seconds
    slower, busier, later = (
        forecast_step(step, replace(made_up(), in_steps=in_steps)).seconds - alone
        for in_steps in (InSteps(1.5, 1.0, 0.0), InSteps(1.0, 1.5, 0.0), InSteps(1.0, 1.0, 2e-3))
    )
    parts = forecast_step(step, made_up()).ranks[0].parts
    around_messages = 3 * made_up().host.get("message", 0.0)
    assert slower == pytest.approx(0.5 * (sum(parts.values()) - parts[Spent.HOST]))
    assert busier == pytest.approx(0.5 * (parts[Spent.HOST] - around_messages))
    assert later == pytest.approx(3 * 2e-3)


FOUR = [mostly(1, 20), mostly(20, 1), mostly(4, 4), mostly(2, 2, views=9000)]


@pytest.mark.parametrize(
    "hidden", [InSteps(1.3, 1.3, 5e-4), InSteps(1.0, 1.0, 2e-3), InSteps(1.2, 1.2, 0.0), InSteps(1.0, 1.0, 0.0)]
)
def test_the_factors_that_explain_steps_are_found(hidden):
    seconds = [forecast_step(step, replace(made_up(), in_steps=hidden)).seconds for step in FOUR]
    found = _explained(made_up(), FOUR, seconds)
    assert (found.computing, found.host) == pytest.approx((hidden.computing, hidden.host), abs=1e-6)
    assert found.message == pytest.approx(hidden.message, abs=1e-9)


def test_a_slow_host_is_told_apart_from_slow_operators():
    hidden = InSteps(1.1, 1.9, 3e-4)
    seconds = [forecast_step(step, replace(made_up(), in_steps=hidden)).seconds for step in FOUR]
    found = _explained(made_up(), FOUR, seconds)
    assert found.host > 1.6 and found.computing == pytest.approx(hidden.computing, abs=0.05)


def test_nothing_is_faster_in_a_step():
    steps = [mostly(1, 20), mostly(20, 1)]
    alone = [forecast_step(step, made_up()).seconds for step in steps]
    assert _explained(made_up(), steps, [0.5 * seconds for seconds in alone]) == InSteps(1.0, 1.0, 0.0)
    sends_less = _explained(made_up(), steps, [0.9 * alone[0], 1.2 * alone[1]])
    assert sends_less.message == 0.0 and sends_less.computing > 1.0


def test_recomputation_costs_the_host_for_each_tensor_that_it_gives_back():
    known = replace(made_up(), host={**made_up().host, "detach": 5e-6})

    def more(phase: Phase) -> float:
        work = OperatorWork("aten.detach", OperatorKind.VIEW, phase)
        slow, fast = (OperatorPrices(ProfileCurves(profile)).price(work).seconds for profile in (known, made_up()))
        return slow - fast

    assert more(Phase.BACKWARD) == pytest.approx(5e-6) and more(Phase.FORWARD) == 0.0
