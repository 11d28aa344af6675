"""Rows that a loop of one's own cuts: what is refused on all ranks, and faults that the gradients show."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.heard import heard
from support.own_loops import batch_of, by_sum, whole_gradients, worst
from support.ranks import ranks
from test_context_doors import DECODER, EXPERTS, experts_first, fsdp2, llama, loop, recomputed, refusal

from meshwright import Layout
from meshwright.core.errors import MeshwrightError
from meshwright.core.record import wrap
from meshwright.distributed import (
    DistributedConfig,
    apply_ac,
    apply_context_parallel,
    apply_tensor_parallel,
    build_pipeline_stage,
    build_stage_module,
    context_parallel_rows,
    init_distributed,
)
from meshwright.distributed.context import context_parallel
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.process.world import get_world_info
from meshwright.models.decoder import Decoder
from meshwright.planning.layout import Shares

CP2 = Layout(dp_shard=1, cp=2)


def entered(batch: Callable[[], dict[str, Any]], model: Callable[[], Any] = lambda: Decoder(DECODER)) -> str:
    """The words of what one rank or all refuse when rows are cut."""
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    laid_out = fsdp2(model(), mesh)
    try:
        with context_parallel_rows(laid_out, batch()) as own:
            laid_out(**own)
    except MeshwrightError as error:
        return str(error)
    return ""


def rank_alone(good: dict[str, Any], bad: dict[str, Any]) -> dict[str, Any]:
    return bad if get_world_info()[0] == 1 else good


TOKENS = torch.arange(24).reshape(2, 12)
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "other rows": (
        lambda: {"tokens": TOKENS + get_world_info()[0]},
        "the 2 ranks of the cp axis brought different rows",
    ),
    "short rows on one rank": (
        lambda: rank_alone({"tokens": TOKENS}, {"tokens": TOKENS[:, :1]}),
        "layout.cp = 2 cuts each row over 2 ranks, and the batch has rows of 1 tokens",
    ),
    "no tokens on one rank": (
        lambda: rank_alone({"tokens": TOKENS}, {"labels": TOKENS}),
        "the batch has no token ids ('input_ids' or 'tokens'), (rows, tokens), whose rows could be cut, but ['labels']",
    ),
    "tokens of three dims": (lambda: {"tokens": TOKENS[None]}, "batch['tokens'] is (1, 2, 12); token ids are whole"),
    "embeddings": (lambda: {"tokens": TOKENS.double()}, "batch['tokens'] is (2, 12); token ids are whole numbers"),
}


@pytest.mark.first("tokens of three dims")
@pytest.mark.parametrize("name", REFUSED)
@ranks(2)
def test_what_cannot_be_cut_is_refused_on_all_ranks(name):
    assert REFUSED[name][1] in entered(REFUSED[name][0])


@pytest.mark.all
@ranks(2)
def test_labels_that_the_model_would_shift_within_a_part_are_refused():
    said = entered(lambda: batch_of(61, key="input_ids"), llama)
    assert "LlamaForCausalLM" in said and "is given labels with a part of each row" in said
    assert "take them out of the arguments (own.pop('labels'))" in said


@pytest.mark.all
@ranks(2)
def test_a_cache_is_refused():
    said = entered(lambda: {"input_ids": TOKENS, "use_cache": True}, llama)
    assert "is given use_cache = True, and keys and values of a part of each row continue nothing" in said


def hides_tensors() -> str:
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    model = apply_context_parallel(Decoder(DECODER), mesh)
    forward = model.forward
    wrap(model, lambda **kwargs: SimpleNamespace(prediction=forward(**kwargs)), "hidden")
    try:
        with context_parallel_rows(model, {"tokens": TOKENS}) as own:
            model(**own)
    except MeshwrightError as error:
        return str(error)
    return ""


def test_an_output_without_visible_tensors_is_refused(spmd):
    for said in spmd(2, hides_tensors):
        assert "returns a SimpleNamespace, in which no tensor is found whose backward could be followed" in said


def together(mode: str) -> str:
    """One backward for two microbatches."""
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    model = fsdp2(apply_ac(apply_context_parallel(Decoder(DECODER), mesh), mode), mesh)
    losses = []
    for rows in (TOKENS, TOKENS + 1):
        with context_parallel_rows(model, {"tokens": rows, "labels": rows}) as own:
            labels = own.pop("labels")
            losses.append(F.cross_entropy(model(**own).flatten(0, 1), labels.flatten()))
    try:
        sum(losses).backward()
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.all
def test_one_backward_for_several_microbatches_is_refused_where_it_recomputes(spmd):
    assert spmd(2, together, "none") == ["", ""]
    for said in spmd(2, together, "full"):
        assert "one backward runs through several microbatches with cut rows, and recomputes activations" in said


@ranks(2)
def test_each_backward_recomputes_its_own_microbatch():
    """Backwards of several microbatches, behind all of their forwards."""
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    torch.manual_seed(0)
    model = Decoder(DECODER).double()
    batches = [batch_of(61, rows=2, length=length) for length in (22, 17)]
    expected = [whole_gradients(model, batch) for batch in batches]
    model = apply_ac(apply_context_parallel(model, mesh), "full")
    losses = []
    for batch in batches:
        with context_parallel_rows(model, batch) as own:
            labels, total = own.pop("labels"), int((batch["labels"] != -100).sum())
            losses.append(by_sum(model(**own), labels, 1, total))
    for loss in losses:
        loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    assert worst(model, {name: expected[0][name] + expected[1][name] for name in expected[0]}) < 1e-10


def whole() -> bool:
    model = Decoder(DECODER)
    with context_parallel_rows(model, {"tokens": TOKENS, "labels": TOKENS}) as own:
        return own["tokens"] is TOKENS and own["labels"] is TOKENS


def test_a_model_whose_rows_nobody_cuts_is_given_whole_rows():
    assert whole()


@pytest.mark.follows("context_parallel_rows()")
@ranks(2)
def test_a_loop_that_cuts_no_rows_is_right_and_warned_once():
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    torch.manual_seed(0)
    model = Decoder(DECODER).double()
    batch = batch_of(61)
    expected = whole_gradients(model, batch)
    model = recomputed(model, mesh)
    with heard() as lines:
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()).backward()
    said = [line for line in lines if "each of the 2 ranks of the cp axis computes all tokens of every row" in line]
    error, warnings = worst(model, expected), len(said)
    assert error < 1e-10 and warnings == 1
    assert "Put context_parallel_rows(model, batch) around the forward." in said[0]
    with heard() as lines:
        again = loop(DECODER, CP2, recomputed)
    assert again < 1e-10 and not any("rows are not cut" in line for line in lines)


# --- doors


def recomputed_first() -> str:
    return refusal(lambda mesh: fsdp2(apply_ac(Decoder(DECODER), "full"), mesh), CP2)


def cut_first() -> str:
    def lay_out(mesh: Any) -> Any:
        return apply_tensor_parallel(apply_context_parallel(Decoder(DECODER), mesh), mesh)

    return refusal(lay_out, Layout(dp_shard=1, cp=2, tp=2))


def staged() -> str:
    return refusal(lambda mesh: fsdp2(build_stage_module(DECODER, 0, 2), mesh), Layout(pp=2, dp_shard=1, cp=2))


def built_stage() -> str:
    def build(mesh: Any) -> Any:
        return build_pipeline_stage(build_stage_module(DECODER, 0, 2), mesh, "cpu", 1, 8, torch.float32)

    return refusal(build, Layout(pp=2, dp_shard=1, cp=2))


def stage_alone() -> str:
    return refusal(lambda mesh: fsdp2(build_stage_module(DECODER, 0, 2), mesh), CP2)


def unknown_method() -> str:
    return refusal(lambda mesh: apply_context_parallel(Decoder(DECODER), mesh, "rings"), CP2)  # type: ignore[arg-type]


DOORS = {
    "rows before tensors": (4, cut_first, "tensor_parallel must come before context_parallel"),
    "a pipeline": (4, staged, "the mesh has cp = 2 beside pp = 2, and this function leaves the step to your own loop"),
    "torch's stage": (4, built_stage, "the mesh has cp = 2 beside pp = 2, and this function"),
    "a stage module": (2, stage_alone, "stage 0 of 2 on a mesh with cp > 1: stages behind the first would not know"),
    "an unknown method": (2, unknown_method, "rings"),
}


@pytest.mark.follows("apply_context_parallel()")
@ranks(2)
def test_rows_are_cut_before_what_comes_behind_them():
    said = recomputed_first()
    assert "behind which rows cannot be cut any more: call apply_context_parallel(model, device_mesh) before" in said
    error = loop(DECODER, CP2, lambda model, mesh: fsdp2(apply_ac(apply_context_parallel(model, mesh), "full"), mesh))
    assert error < 1e-10


@pytest.mark.parametrize("name", DOORS)
def test_doors_refuse_by_name(spmd, name):
    world, job, words = DOORS[name]
    for said in spmd(world, job):
        assert words in said


# --- faults


def faulty(fault: str) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "recomputes whole rows":
            patch.setattr(context_parallel._Backward, "watch", lambda *_: None)
            return loop(DECODER, CP2, recomputed, by_sum, False)
        if fault == "keeps its place":
            correct = context_parallel._Backward._enter

            def enter(self: Any, gradient: torch.Tensor) -> None:
                rows = self._rows
                self._rows = type(rows)(1 - rows.rank, rows.length, rows.places, rows.counts)
                correct(self, gradient)

            patch.setattr(context_parallel._Backward, "_enter", enter)
            return loop(DECODER, CP2, recomputed, by_sum, False)
        patch.setattr(Shares, "batch_ranks", property(lambda shares: shares.data_ranks))
        return loop(EXPERTS, Layout(dp_shard=2, cp=2, ep=2), experts_first)


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", ["recomputes whole rows", "keeps its place", "experts of data ranks"])
def test_gradients_or_an_error_show(spmd, fault):
    try:
        found = max(spmd(4 if "experts" in fault else 2, faulty, fault))
    except WorkerFailed as error:  # torch compares the shapes of what it recomputes
        assert fault == "recomputes whole rows" and "CheckpointError" in str(error)
        found = math.inf
    assert found > 1e-3
