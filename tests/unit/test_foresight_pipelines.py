"""Forecasts of pipelines: simulated by their schedules, bounded below, and with the memory that the orders hold."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from support.forecasts import CONFIG
from support.schedule_tables import write_schedule

from benchmarks.published.shapes import decoder_block
from meshwright.cli.main import main
from meshwright.core.errors import ConfigError
from meshwright.planning.layout import Layout
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.pipeline.schedule import peak_live, simulate, wait_order
from meshwright.simulation import pipeline
from meshwright.simulation.cards import machines
from meshwright.simulation.job import Architecture, Execution, Job
from meshwright.simulation.pipeline import (
    StageSeconds,
    held_on,
    least_pipeline_seconds,
    pipeline_seconds,
    pipeline_spans,
    schedule_of,
)
from meshwright.simulation.search import Pin, search
from meshwright.simulation.step_memory import SavedBytes, rank_memory, step_memory
from meshwright.simulation.step_time import Cost, Kinds, least_step_seconds, stage_seconds, step_time


def job(pp: int, microbatches: int, schedule: str = "1f1b", per_rank: int = 0, blocks: int = 24) -> Job:
    block = decoder_block(2048, 16, 8, 5632)
    per_rank = per_rank or KINDS[schedule].per_rank(blocks, pp)
    run = Execution(schedule=schedule, stages_per_rank=per_rank)
    model = Architecture("small", (block,) * blocks, 32_000)
    return Job(model, Layout(pp=pp, dp_shard=1), 2048, microbatches, 1, run, machines("h100", 8))


def uneven(generator: random.Random, stages: int, message: float = 0.0) -> StageSeconds:
    forward = [generator.uniform(0.5, 1.5) for _ in range(stages)]
    backward = [time * generator.uniform(1.5, 2.5) for time in forward]
    weight = [time * generator.uniform(0.2, 0.6) for time in backward]
    return StageSeconds(tuple(forward), tuple(backward), tuple(weight), message)


def cases() -> list[tuple[str, int, int, int]]:
    """(schedule, ranks, microbatches, stages per rank)"""
    generator, found = random.Random(5), []
    for name, kind in KINDS.items():
        for _ in range(6):
            ranks = generator.choice([2, 3, 4])
            per_rank = generator.choice([1, 2, 3]) if kind.loops else kind.per_rank(99, ranks)
            found.append((name, ranks, kind.legal(generator.randint(2, 20), ranks), per_rank))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (4, 30), (8, 3)])
def test_even_stages_take_what_the_closed_form_says(schedule, ranks, microbatches):
    stages = StageSeconds((0.25,) * ranks, (0.5,) * ranks, (0.2,) * ranks, 0.0)
    found = pipeline_seconds(job(ranks, microbatches, schedule), stages)
    assert found == pytest.approx((microbatches + ranks - 1) * 0.75)


def test_zero_bubble_is_shorter_than_1f1b_as_computed_by_hand():
    """Two ranks, two microbatches, a second for each of F, I and W: of 9 seconds 1F1B waits 3, ZB-H1 of 7 one."""
    stages = StageSeconds((1.0, 1.0), (2.0, 2.0), (1.0, 1.0), 0.0)
    assert pipeline_seconds(job(2, 2, "1f1b"), stages) == 9.0
    split = job(2, 2, "interleaved_zero_bubble", 1)
    assert pipeline_seconds(split, stages) == 7.0
    first = [(str(action), begin, end) for action, begin, end in pipeline_spans(split, stages)[0]]
    assert first == [("0F0", 0, 1), ("0F1", 1, 2), ("0I0", 3, 4), ("0W0", 4, 5), ("0I1", 5, 6), ("0W1", 6, 7)]


def test_messages_lengthen_the_way_there_and_back():
    stages = StageSeconds((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, 0.1)
    assert pipeline_seconds(job(4, 1), stages) == pytest.approx(12 + 6 * 0.1)
    together = replace(stages, forward=(1.0,) * 8, backward=(2.0,) * 8, weight=(1.0,) * 8)
    assert pipeline_seconds(job(4, 1, "zbv_zero_bubble"), together) == pytest.approx(  # at the V's turn none is sent
        max(end for lane in pipeline_spans(job(4, 1, "zbv_zero_bubble"), together) for _, _, end in lane)
    )
    assert pipeline_seconds(job(4, 1, "zbv_zero_bubble"), together) < 8 + 16 + 14 * 0.1


@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_pipeline_is_quicker_than_its_bound(case):
    name, ranks, microbatches, per_rank = case
    asked, generator = job(ranks, microbatches, name, per_rank), random.Random(str(case))
    for message in (0.0, 0.02, 0.5):
        stages = uneven(generator, ranks * per_rank, message)
        simulated = pipeline_seconds(asked, stages)
        assert least_pipeline_seconds(asked, stages) <= simulated * (1 + 1e-12)
        assert least_pipeline_seconds(asked, stages, (0,)) <= least_pipeline_seconds(asked, stages)


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"]
)
def test_long_steps_are_as_long_as_if_every_microbatch_were_simulated(name):
    generator, skipped = random.Random(name), 0
    for number in range(8):
        ranks = generator.choice([2, 3])
        asked = job(ranks, KINDS[name].legal(generator.randint(60, 90), ranks), name)
        stages = uneven(generator, asked.stages, generator.choice([0.0, 0.05]))
        if number % 2:
            stages = StageSeconds((1.0,) * asked.stages, (2.0,) * asked.stages, (0.8,) * asked.stages, stages.message)
        order = wait_order(schedule_of(asked))
        whole = max(order.ends([stages.of(work)[stage] for stage, work, _ in order.actions], stages.message))
        pipeline._compact.cache_clear()
        pipeline._makespan.cache_clear()
        assert pipeline_seconds(asked, stages) == pytest.approx(whole, rel=1e-10)
        skipped += pipeline._compact.cache_info().currsize == 1  # the short order alone was built
    assert skipped >= 2


@pytest.mark.parametrize("case", cases(), ids=str)
def test_ranks_hold_what_the_order_of_the_schedule_holds(case):
    name, ranks, microbatches, per_rank = case
    schedule = KINDS[name].build(ranks, microbatches, per_rank)
    for rank, most in enumerate(peak_live(schedule)):
        held = held_on(job(ranks, microbatches, name, per_rank), rank)
        assert max(sum(one.whole) + sum(one.deferred) for one in held) == most
        assert any(any(one.deferred) for one in held) == any(str(action.work) == "W" for action in schedule.ranks[rank])


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_more_microbatches_than_a_few_rounds_are_never_held(name):
    for ranks in (2, 3, 5):
        asked = job(ranks, 11 * ranks, name, 3 if name == "interleaved_1f1b" else 0)
        for rank in range(ranks):
            assert held_on(asked, rank) == pipeline._fullest(schedule_of(asked), rank)


def test_memory_follows_the_schedule():
    sizes = {name: step_memory(job(4, 16, name, blocks=32)) for name in KINDS}
    assert sizes["gpipe"].activations > 3.5 * sizes["1f1b"].activations  # 16 microbatches, not 4
    saved = SavedBytes(job(4, 16))
    last = {name: rank_memory(job(4, 16, name), 3, saved) for name in ("gpipe", "1f1b")}
    norms = 15 * 3 * saved.wide  # the last norm's input in fp32, and its output
    assert last["gpipe"].logits - norms == 17 / 2 * last["1f1b"].logits  # of 16 softmaxes, and the gradient of one
    assert sizes["zbv_zero_bubble"].activations < 1.5 * sizes["1f1b"].activations
    split, whole = (step_memory(job(4, 16, name, 1)) for name in ("interleaved_zero_bubble", "interleaved_1f1b"))
    assert split.activations > whole.activations  # weight gradients wait with their inputs


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_step_is_the_simulated_schedule_and_what_follows_it(case):
    name, ranks, microbatches, per_rank = case
    asked = job(ranks, microbatches, name, per_rank)
    kinds = Kinds(asked)
    stages, time = stage_seconds(asked, kinds), step_time(asked)
    work = simulate(schedule_of(asked), lambda a: stages.of(a.work)[a.stage], stages.message).makespan
    rest = sum(time.costs.get(cost, 0.0) for cost in (Cost.DATA, Cost.OPTIMIZER))
    assert time.seconds == pytest.approx(work + rest)
    assert (
        least_step_seconds(asked, kinds) <= least_step_seconds(asked, kinds, closely=True) <= time.seconds * (1 + 1e-12)
    )


def test_all_that_a_search_shows_was_simulated():
    base = job(1, 32)
    found = search(base, (Pin.parse("pp>=2"),), keep=6)
    assert len(found.best) == 6 and {one.job.layout.pp for one in found.best} <= {2, 4, 8}
    for one in (*found.best, *found.front):
        assert one.time.seconds == step_time(one.job).seconds and one.memory == step_memory(one.job)
    seconds = [one.time.seconds for one in found.best]
    assert seconds == sorted(seconds)


def ask(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--gpus", "16", "--gpu", "h100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["candidates"][0]


@pytest.mark.all
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
def test_a_layout_that_was_found_is_judged_as_it_was_found(tmp_path, capsys, schedule):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    pins = ("pp=4", "stages_per_rank=2", f"schedule={schedule}", "microbatch<=2")
    found = ask(capsys, str(config), *(word for pin in pins for word in ("--pin", pin)))
    words = [f"--layout.{axis}={size}" for axis, size in found["layout"].items()]
    words += [f"--batch.microbatch={found['microbatch']}", f"--techniques.loss_chunks={found['loss_chunks']}"]
    words += [f"--techniques.activation_checkpointing={found['recompute']}"]
    words += [f"--techniques.reshard_after_forward={str(found['reshard_after_forward']).lower()}"]
    if schedule == "interleaved_1f1b":
        words.append(f"--techniques.layers_per_stage={32 // (4 * 2)}")
    judged = ask(capsys, str(config), *words, f"--techniques.pipeline_schedule={found['schedule']}")
    assert found["schedule"] == schedule and judged == found


def test_a_search_tries_zero_bubbles_where_the_rules_allow_them():
    pins = (Pin.parse("pp=4"), Pin.parse("tp=2"))
    free = search(replace(job(1, 16), execution=Execution()), pins)
    assert {one.job.execution.schedule for one in free.best} == {"", "zbv_zero_bubble"}
    for refused in (Execution(fused=True), Execution(reduces_each=True)):  # compiled; reduced with every microbatch
        found = search(replace(job(1, 16), execution=refused), pins)
        assert {one.job.execution.schedule for one in found.best} == {""}
    with pytest.raises(ConfigError, match="schedule=1f1b"):
        Pin.parse("schedule=fast")


@pytest.mark.all
def test_a_schedule_of_ones_own_is_judged_as_the_known_one_with_its_order(tmp_path, capsys):
    config, table = tmp_path / "c.toml", tmp_path / "order.csv"
    config.write_text(CONFIG)
    write_schedule(KINDS["zbv_zero_bubble"].build(4, 16, 2), table)
    given = [str(config), "--layout.pp=4", "--layout.dp_shard=4", "--batch.microbatch=1"]
    known = ask(capsys, *given, "--techniques.pipeline_schedule=zbv_zero_bubble")
    own = ask(capsys, *given, f"--techniques.pipeline_schedule={table}")
    assert own.pop("schedule") == str(table) and known.pop("schedule") == "zbv_zero_bubble"
    assert own == known and own["stages_per_rank"] == 2
