"""Pipelines in real processes: equal to one process, send what the plan said, keep what the schedule promises, and
end together.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families
from support.laid_out import Figures, Held, assert_same, counted, estimated, held, own_rows
from support.ranks import ranks, refusal
from support.schedule_tables import write_schedule

from meshwright import UnsupportedError
from meshwright.checkpoint import load, save
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import order, parallel_model
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.pipeline.run import Pipeline, StageLost, Ties
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.step.deferred import DeferredGradients
from meshwright.distributed.tensor.layers import local
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.layout import Layout
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.pipeline.schedule import peak_live
from meshwright.planning.pipeline.stages import pipeline_collectives
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

VOCABULARY = 64
UNTIED = DecoderConfig(VOCABULARY, 16, 4, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=20)
TIED = replace(UNTIED, tied_embeddings=True)
DEEP = replace(UNTIED, n_layers=8)
ONE = Layout(dp_shard=1)
PP2, PP4 = Layout(pp=2, dp_shard=1), Layout(pp=4, dp_shard=1)
SHARDED, REPLICATED, TENSOR = (
    Layout(pp=2, dp_shard=2),
    Layout(pp=2, dp_replicate=2, dp_shard=1),
    Layout(pp=2, dp_shard=1, tp=2),
)
HYBRID = Layout(pp=2, dp_replicate=2, dp_shard=2)

WAYS: dict[str, tuple[DecoderConfig, Layout, dict[str, Any]]] = {
    **{f"pp4, {name}": (DEEP, PP4, {"pipeline_schedule": name}) for name in KINDS},
    "frozen behind": (UNTIED, PP2, {"freeze": ("norm", "head"), "pipeline_schedule": "zbv_zero_bubble"}),
    "cut elsewhere": (UNTIED, PP2, {"pipeline_cuts": (3,)}),
}
"""Not in the array (test_ways): four stages, and requests that it has no factor for."""


@pytest.mark.parametrize("name", WAYS)
def test_a_pipeline_is_equal_to_one_process(pool, measured, name):
    model, layout, techniques = WAYS[name]
    report = verify(
        model, layout, RandomBatches(VOCABULARY, 8, 9), steps=2, dtypes=("float64",), techniques=techniques, pool=pool
    )
    assert report, report
    assert "head" in {d.name for d in report.comparisons[0].of("forward")}, "what the last stage computes is compared"
    measured(
        f"{layout}: {name}",
        "pipelines, decoder",
        {"gradient": max(d.error for d in report.comparisons[0].of("gradient"))},
    )


@pytest.mark.parametrize("layout", [SHARDED, TENSOR], ids=str)
def test_bf16_costs_no_more_than_the_dtype_does(pool, layout):
    requested = {"pipeline_schedule": "interleaved_1f1b"}
    report = verify(
        TIED,
        layout,
        RandomBatches(VOCABULARY, 8, 9),
        steps=1,
        dtypes=("bfloat16", "float32"),
        techniques=requested,
        pool=pool,
    )
    assert report, report


FAMILIES = ["llama", "gpt2", "gemma2", "gemma3_text", "bloom", "gpt_neox", "phi3", "olmo2", "opt", "gpt_bigcode"]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def family(name: str) -> Any:
    return families.config_of(name, **(SLIDING if name.startswith("gemma") else {}))


@pytest.mark.parametrize("layout", [PP2, TENSOR], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_equal_to_one_process(pool, name, layout):
    report = verify(family(name), layout, steps=2, dtypes=("float64",), pool=pool)
    assert report, report


class Forwards:
    """Counts those of the first block of each stage."""

    def __init__(self, model: ParallelModel):
        self.number = 0
        pipeline = model.plan.pipeline
        assert pipeline is not None
        for stage, module in zip(pipeline.stages_on(pp_rank(model)), model.parts, strict=True):
            attention = module.get_submodule(f"{pipeline.stages[stage].blocks[0]}.attention")
            attention.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.number += 1


def pp_rank(model: ParallelModel) -> int:
    assert model.mesh is not None
    return model.mesh.get_local_rank("pp")


@pytest.mark.first("zbv_zero_bubble")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"])
@ranks(2)
def test_a_block_is_recomputed_once_for_each_microbatch(schedule):
    model = made(PP2, schedule, activation_checkpointing="full")
    counted = Forwards(model)
    model.forward_backward(batch_of(8, 9))
    forwards, stages = counted.number, len(model.parts)
    assert forwards == 2 * 4 * stages


# --- a step


def batch_of(rows: int, seq: int, step: int = 0) -> dict[str, torch.Tensor]:
    return dict(RandomBatches(VOCABULARY, rows, seq, ())(step))


def made(layout: Layout, schedule: str = "1f1b", model: DecoderConfig = TIED, **techniques: Any) -> ParallelModel:
    requested = {
        "precision": {"master": "float64"},
        **({"pipeline_schedule": schedule} if layout.pp > 1 else {}),
        **techniques,
    }
    return parallelize(model, layout, techniques=requested, seed=3)


def used(layout: Layout, schedule: str = "1f1b", fault: str = "") -> dict[str, Any]:
    """Steps of several lengths and sizes, a step that nobody takes, evaluation and generation."""
    at_once = fault in ("", "copied_from_nowhere")  # the others would be caught by the rehearsal
    model = None if at_once else made(layout, schedule)
    with FAULTS[fault]() if fault else nullcontext():
        model = model or made(layout, schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        said: dict[str, Any] = {"losses": [], "norms": []}
        for step, (rows, seq) in enumerate([(8, 9), (8, 6), (2, 9), (6, 11)]):
            batch = own_rows(model, batch_of(rows, seq, step))
            if step == 1:  # two calls add up
                model.forward_backward(batch)
            said["losses"].append(float(model.forward_backward(batch)))
            said["norms"].append(model.optimizer_step(optimizer, 0.1).grad_norm)
        said["evaluated"] = float(model.evaluate(own_rows(model, batch_of(8, 9, 7))))
        said["likeliest"] = model.generate([1, 2, 3], 5, temperature=0.0)
        said["weights"] = whole_on_first(dict(model.named_parameters()), differ=model.plan.pipeline is not None)
        said["ties"] = [local(p).detach().clone() for name, p in model.named_parameters() if name == "embedding.weight"]
        return said


@pytest.fixture(scope="session")
def by_one_process(pool):
    return pool.run(used, ONE, world=1, timeout=120)[0]


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [(PP2, "1f1b"), (PP2, "zbv_zero_bubble"), (PP4, "1f1b"), (REPLICATED, "dualpipe_v"), (TENSOR, "interleaved_1f1b")],
    ids=str,
)
def test_steps_evaluation_and_generation_are_those_of_one_process(spmd, by_one_process, layout, schedule):
    runs = spmd(layout.world, used, layout, schedule)
    for said in runs:
        for key in ("losses", "norms", "evaluated", "likeliest"):
            assert said[key] == pytest.approx(by_one_process[key], rel=1e-10), key
    errors = relative_errors(runs[0]["weights"], by_one_process["weights"])
    assert len(errors) > 30 and max(errors.values()) <= 1e-10
    if layout.tp == 1:
        ties = [tie for said in runs for tie in said["ties"]]
        assert len(ties) == 2 * layout.world // layout.pp and all(torch.equal(tie, ties[0]) for tie in ties)


@contextmanager
def reduced_before_the_last_weights() -> Iterator[None]:
    """As DDP does under a split backward, which reduces when inputs have their gradients: replicas keep weight
    gradients of their own.
    """
    late: list[tuple[DeferredGradients, int]] = []
    do, reduce = DeferredGradients.do, fully_sharded.reduce_gradients

    def postponed(self: DeferredGradients, microbatch: int) -> None:
        late.append((self, microbatch))

    def first_reduce(model: Any) -> None:
        reduce(model)
        while late:
            deferred, microbatch = late.pop()
            do(deferred, microbatch)

    with (
        patch.object(DeferredGradients, "do", postponed),
        patch.object(fully_sharded, "reduce_gradients", first_reduce),
    ):
        yield


norm_of = parallel_model.total_norm
FAULTS = {
    "untied": partial(patch.object, Ties, "_sum", lambda self, first, last: None),
    "norm_of_own_stage": partial(patch.object, parallel_model, "total_norm", lambda parts, over=(): norm_of(parts)),
    "reduced_before_the_last_weights": reduced_before_the_last_weights,
    "copied_from_nowhere": partial(patch.object, Ties, "copy", lambda self: None),
}


@pytest.mark.kills("pipeline", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(spmd, by_one_process, fault):
    layout = REPLICATED if fault == "reduced_before_the_last_weights" else PP2
    said = spmd(layout.world, used, layout, "zbv_zero_bubble" if layout is REPLICATED else "1f1b", fault)[0]
    weights = max(relative_errors(said["weights"], by_one_process["weights"]).values())
    assert weights > 1e-6 or said["norms"] != pytest.approx(by_one_process["norms"], rel=1e-6)


# --- what travels, and what is kept

WIRE = {
    "split backward": (UNTIED, SHARDED, {"pipeline_schedule": "zbv_zero_bubble"}),
    "tensor": (TIED, TENSOR, {"pipeline_schedule": "interleaved_1f1b"}),
    "replicated": (TIED, REPLICATED, {"pipeline_schedule": "looped_bfs"}),
}


def one_step(
    model: DecoderConfig, layout: Layout, techniques: dict[str, Any], seq: int
) -> tuple[Figures, Figures, int, int]:
    """What the plan foresees for this rank and what it sent, by operation and ranks.

    What the schedule keeps at most and what was kept.
    """
    laid = parallelize(model, layout, techniques=techniques, seed=3)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    for step in range(2):
        with WireCounter() as wire:
            laid.forward_backward(own_rows(laid, batch_of(8, seq, step)))
            laid.optimizer_step(optimizer, 1.0)
    assert laid.mesh is not None and laid.plan.pipeline is not None
    rank = laid.mesh.get_local_rank("pp")
    plan = replace(laid.plan, collectives=pipeline_collectives(laid.facts, laid.plan)[rank])
    runner = laid._runner
    assert isinstance(runner, Pipeline)
    order = laid.plan.pipeline.order(
        8 // (plan.data_ranks * laid.plan.pipeline.rows_per_microbatch(8 // plan.data_ranks))
    )
    return estimated(plan, Batch(8, seq)), counted(wire), peak_live(order)[rank], runner.most_kept


@pytest.mark.parametrize("name", WIRE)
def test_what_travels_and_what_is_kept_is_what_the_plan_said(spmd, name):
    model, layout, techniques = WIRE[name]
    for planned, sent, promised, kept in spmd(layout.world, one_step, model, layout, techniques, 9):
        assert sent == planned
        assert kept == promised


def test_a_boundary_carries_the_hidden_states_of_a_microbatch(spmd):
    """bytes per element · ⌈seq / tp⌉ · rows · features, each way."""
    for layout, share in ((PP2, 9), (TENSOR, 5)):
        rows, microbatches = 2, 4
        for rank, (_, sent, *_) in enumerate(spmd(layout.world, one_step, UNTIED, layout, {}, 9)):
            assert sent["send", 2] == (microbatches, microbatches * 4 * share * rows * UNTIED.dim), rank


# --- checkpoints


def trained(layout: Layout, schedule: str, folder: str) -> Held:
    model = made(layout, schedule)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(8, 9, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer)
    return held(model, optimizer)


def read(layout: Layout, schedule: str, folder: str, onto: str) -> Held:
    model = made(layout, schedule)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    load(model, folder, optimizer=optimizer)
    save(model, onto, optimizer=optimizer)
    model.audit(optimizer)
    return held(model, optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_a_checkpoint_is_read_by_every_other_layout_and_back_bit_by_bit(spmd, tmp_path, schedule):
    folder = str(tmp_path / "first")
    written = spmd(4, trained, SHARDED, schedule, folder)[0]
    assert len(written[0]) > 30 and len(written[1]) == 3 * len(written[0])
    for number, layout in enumerate((Layout(dp_shard=4), Layout(tp=2, dp_shard=2), SHARDED)):
        onto = str(tmp_path / str(number))
        found = spmd(4, read, layout, schedule, folder, onto)[0]
        assert_same(found, written, layout)
        folder = onto


# --- a schedule of the user's own; what is refused; ends


def test_a_schedule_from_a_table_runs(pool, tmp_path):
    kind = KINDS["zbv_zero_bubble"]
    write_schedule(kind.build(2, 4, 2), tmp_path / "mine.csv")
    requested = {"pipeline_schedule": str(tmp_path / "mine.csv")}
    report = verify(
        UNTIED, PP2, RandomBatches(VOCABULARY, 8, 9), steps=1, dtypes=("float64",), techniques=requested, pool=pool
    )
    assert report, report


def too_many(path: str) -> str:
    model = parallelize(UNTIED, PP2, techniques={"pipeline_schedule": path}, microbatch_rows=1)
    return refusal(lambda: model.forward_backward(batch_of(8, 9)), UnsupportedError)


@pytest.mark.first
def test_a_step_that_a_table_has_no_actions_for_is_refused_on_all_ranks(spmd, tmp_path):
    write_schedule(KINDS["1f1b"].build(2, 4, 1), tmp_path / "mine.csv")
    for text in spmd(2, too_many, str(tmp_path / "mine.csv")):
        assert "mine.csv is for 4 microbatches, and the step has 8" in text


@ranks(2)
def test_two_steps_without_learning_give_one_loss():
    """A step that fails on one rank's stage ends on both; after a new start the next is as if nothing had been."""
    model = made(PP2)
    batch = batch_of(8, 9)
    expected = float(model.forward_backward(batch))
    model.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert expected == float(model.forward_backward(batch))


def hear_of_a_loss() -> str:
    """The second stage's connections end in its forward, as they do with its process; what the first one says."""
    model = made(PP2)
    if pp_rank(model) == 1:
        model.parts[0].register_forward_pre_hook(lambda *_: end_connections())
    return refusal(lambda: model.forward_backward(batch_of(8, 9)), StageLost)


def end_connections() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                found.shutdown(socket.SHUT_RDWR)


def test_when_a_stage_is_lost_the_others_stop_in_seconds_and_say_which(spmd):
    begun = time.monotonic()
    heard, _ = spmd(2, hear_of_a_loss)
    assert time.monotonic() - begun < 60
    blocks = r"layers\.2 to layers\.3"
    said = (
        rf"stage 1 \({blocks}, on rank 1\) sent no gradient of microbatch \d|rank 1 \(stage 1 of 2: {blocks}\)"
        rf" accepted no further message"
    )
    assert re.match(rf"({said}).*: its process ended, or does not answer \(", heard), heard


# --- what is laid out was proved


def proved(layout: Layout) -> tuple[list[Any], list[Any]]:
    """What was rehearsed before anything was laid out, and what the laid out model goes by."""
    rehearsed: list[Any] = []
    lay_out = order.lay_out
    before: list[Any] = []

    def noted(*args: Any) -> Any:
        before.extend(rehearsed)
        return lay_out(*args)

    with (
        patch.object(order.tensor_parallel, "prove", lambda facts, plan, **options: rehearsed.append(plan)),
        patch.object(order.stages, "prove", lambda facts, plan, ranks: rehearsed.append((plan, ranks))),
        patch.object(order, "lay_out", noted),
    ):
        plan = parallelize(UNTIED, layout, seed=1).plan
    return before, [plan.tensor, (plan.pipeline, layout.tp)]


def test_the_plan_that_is_laid_out_is_the_one_that_was_proved(spmd):
    (before, laid_out), *others = spmd(4, proved, TENSOR)
    assert all(plan in before for plan in laid_out) and None not in laid_out
    assert all(rehearsed == [] and plans == laid_out for rehearsed, plans in others), "one rank rehearses for all"


@pytest.mark.first
@ranks(2)
def test_what_is_refuted_is_not_laid_out():
    def refuse(*args: Any) -> None:
        raise UnsupportedError("the stages do not give what the whole model gives")

    with (
        patch.object(order.stages, "prove", refuse),
        patch.object(order, "lay_out") as laid_out,
        pytest.raises(UnsupportedError, match="do not give"),
    ):
        parallelize(UNTIED, PP2, seed=1)
    assert not laid_out.called
