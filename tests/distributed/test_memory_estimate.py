"""What a step holds of activations and logits was foreseen, before any process group existed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.adapters import adapted
from support.families import config_of
from support.laid_out import own_rows
from support.unhurried import Unhurried, least_of
from torch import Tensor, nn

from meshwright import Layout
from meshwright.distributed import experts
from meshwright.distributed.memory import dry_run
from meshwright.distributed.memory import dry_run as fake
from meshwright.distributed.memory import dry_run as pipeline_ranks
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.memory.dry_run import default_optimizer, estimate_memory
from meshwright.distributed.mesh import get_pp_rank, tensor_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig
from meshwright.models.layers import Router
from meshwright.planning.build import plan
from meshwright.planning.memory import MemoryEstimate, MemoryUse, RankMemory, bytes_of_states, plan_memory
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch, DataParallel
from meshwright.verification.problem import RandomBatches

VOCABULARY, SEQ, ROWS = 258, 64, 4
MODEL = DecoderConfig(VOCABULARY, 64, 6, 4, 2, 128, SEQ)
WIDE = DecoderConfig(VOCABULARY, 256, 3, 4, 2, 1024, SEQ)
SPARSE = DecoderConfig(VOCABULARY, 64, 4, 4, 2, 128, SEQ, moe=MoEConfig(n_experts=8))
UNEVEN = replace(SPARSE, moe=MoEConfig(n_experts=3))
TOGETHER, KIND = 0.005, 0.03
"""Bounds of the relative error, of all bytes together and of each kind.

All together is exact but for what a dry run cannot know, such as where a rank's tokens of cut rows lie; owners are
looked up where a kind may have 1 % more than ever.
"""

ONE, FSDP2, FSDP4, TENSOR, STAGES, ROWS_CUT = (
    Layout(dp_shard=1),
    Layout(dp_shard=2),
    Layout(dp_shard=4),
    Layout(dp_shard=1, tp=2),
    Layout(dp_shard=1, pp=2),
    Layout(dp_shard=1, cp=2),
)
BF16 = {"precision": {"compute": "bfloat16"}}
FULL = {"activation_checkpointing": "full"}
IN_4_BITS = {"freeze": (r"layers\.[012]\..*w.*weight",), "quantize_frozen": "nf4"}
Case = tuple[Any, Layout, dict[str, Any], int]
"""Model, layout, techniques, microbatches."""


def family(name: str, **changes: Any) -> Callable[[], CausalLM]:
    """Made where it is used: to list the tests takes no transformers."""
    return partial(_family, name, **changes)


FAMILY = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "hidden_size": 64, "num_hidden_layers": 4}


def _family(name: str, **changes: Any) -> CausalLM:
    return CausalLM(config_of(name, **FAMILY | changes))


def base_in_half() -> nn.Module:
    """Adapters in float32 beside a frozen base in bfloat16."""
    model = adapted("llama", **{f"model_{key}": size for key, size in FAMILY.items()})
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return model


def of(case: Case) -> Case:
    """The case, with its model made."""
    return (case[0]() if isinstance(case[0], partial) else case[0], *case[1:])


def keys_of(model: Any, layout: Layout) -> tuple[str, ...]:
    if layout.cp > 1:
        return ()  # documents decide who has which token, and what travels
    if layout.ep > 1:
        return ("positions",)  # padding between documents goes to no expert
    return ("positions", "document_ids") if isinstance(model, DecoderConfig) else ("positions",)


def estimated(case: Case) -> tuple[Plan, Batch, MemoryEstimate]:
    model, layout, techniques, microbatches = of(case)
    batch = Batch(ROWS * microbatches * layout.dp_replicate * layout.dp_shard, SEQ, ROWS)
    made = plan(model, layout, techniques=techniques, batch=batch)
    return (
        made,
        batch,
        estimate_memory(model_facts(as_module(model)), made, batch, keys=("tokens", "labels", *keys_of(model, layout))),
    )


def in_turn(router: Any, scores: Tensor) -> Tensor:
    """Experts that have equally many tokens, as the estimate assumes."""
    rows, length, _ = scores.shape
    chosen = torch.arange(rows * length * router.config.top_k) % router.config.n_experts
    return chosen.view(rows, length, -1)


def compared(case: Case) -> tuple[RankMemory, RankMemory]:
    """Found in whole steps from the third on, by which DDP's buckets have their order; and foreseen."""
    case = of(case)
    model, layout, *_ = case
    made, batch, estimate = estimated(case)
    laid = parallelize(model, layout if layout.world > 1 else None, plan=made, seed=1, microbatch_rows=ROWS)
    optimizer = default_optimizer(laid)
    rows = own_rows(
        laid, dict(RandomBatches(VOCABULARY, rows=batch.global_rows, seq_len=SEQ, keys=keys_of(model, layout))(0))
    )
    watches = [MemoryAccount(laid.parts, dims_of_logits(VOCABULARY, layout.tp), optimizer=optimizer) for _ in range(2)]
    with patch.object(Router, "_choose", in_turn):
        for watch in (nullcontext(), nullcontext(), *watches):
            with Unhurried(), watch:
                laid.forward_backward(rows)
                if isinstance(watch, MemoryAccount):
                    watch.look()  # as after a run's first step: all gradients are there
                laid.optimizer_step(optimizer)
    assert not estimate.why_not, estimate.why_not
    rank = get_pp_rank(laid.mesh) if laid.plan.pipeline is not None else None
    found = RankMemory(*least_of(watches))
    assert bytes_of_states(made, batch)[rank or 0].host <= found.total
    assert of_evaluation(laid, optimizer, rows) <= (1 + TOGETHER) * estimate.of(rank).total
    return found, estimate.of(rank)


def of_evaluation(laid: ParallelModel, optimizer: torch.optim.Optimizer, rows: dict[str, Tensor]) -> int:
    """The most bytes of a validation's batch, which has the rows of a microbatch."""
    vocabulary = dims_of_logits(VOCABULARY, tensor_position(laid.mesh)[1])
    with Unhurried(), MemoryAccount(laid.parts, vocabulary, optimizer=optimizer) as account:
        laid.evaluate({key: value[:ROWS] for key, value in rows.items()})
    return sum(account.peak.values())


def recomputing(mode: str, **keys: Any) -> Case:
    return MODEL, ONE, {"activation_checkpointing": mode, **keys}, 1


ALONE: dict[str, Case] = {
    "none": (MODEL, ONE, {}, 1),
    "several microbatches": (MODEL, ONE, {}, 3),
    "full": (MODEL, ONE, FULL, 1),
    "each second": recomputing("every_n"),
    "each third": recomputing("every_n", checkpoint_every=3),
    "attention": recomputing("selective"),
    "feed-forwards": recomputing("modules", checkpoint_modules=("layers.*.feed_forward",)),
    "products kept": recomputing("selective_op", checkpoint_keep=("matmuls", "attention")),
    "offload": recomputing("offload"),
    "chunked loss": (MODEL, ONE, {"loss_chunks": 4}, 1),
    "moments in host memory, full": (MODEL, ONE, {"cpu_offload": "optimizer", **FULL}, 2),
    "start frozen": (MODEL, ONE, {"freeze": ("embedding", r"layers\.[012]")}, 1),
    "experts": (SPARSE, ONE, {}, 1),
    **{name: (family(name), ONE, {}, 1) for name in ("llama", "gpt2", "gemma2", "mixtral")},
}
SHARDED: dict[str, Case] = {
    "sharded": (MODEL, FSDP2, {}, 1),
    "ZeRO-1": (MODEL, FSDP2, {"zero_stage": 1}, 3),
    "ZeRO-2": (MODEL, FSDP2, {"zero_stage": 2}, 3),
    "bf16, full": (MODEL, FSDP2, {**BF16, **FULL}, 2),
    "parameters outweigh activations": (WIDE, FSDP2, BF16, 2),
    "float8": (MODEL, FSDP2, {"float8": "tensorwise"}, 1),
    "weights in 4 bits, bf16": (WIDE, FSDP2, {**BF16, **IN_4_BITS}, 2),
    "weights in 4 bits, full": (MODEL, FSDP2, {**FULL, **IN_4_BITS}, 1),
    "replicated": (MODEL, Layout(dp_replicate=2, dp_shard=1), {}, 2),
    "experts, full": (SPARSE, FSDP2, FULL, 1),
    "experts cut inside": (UNEVEN, FSDP2, BF16, 2),
    "experts shared out": (SPARSE, Layout(dp_shard=2, ep=2), {}, 1),
    "replicated, reduced each time": (MODEL, Layout(dp_replicate=2, dp_shard=1), {"sync_grad_accum": True}, 3),
    "gpt_neox, full": (family("gpt_neox"), FSDP2, FULL, 1),
    "two dtypes": (partial(base_in_half), FSDP2, {}, 1),
    "two dtypes, ZeRO-2, full": (partial(base_in_half), FSDP2, {"zero_stage": 2, **FULL}, 2),
}
CUT: dict[str, Case] = {
    "tensor": (MODEL, TENSOR, {}, 1),
    "whole sequences": (MODEL, TENSOR, {"sequence_parallel": False}, 1),
    "kept gathered": (MODEL, TENSOR, {"regather": False}, 1),
    "tensor, full": (MODEL, TENSOR, FULL, 1),
    "collectives kept": (
        MODEL,
        TENSOR,
        {"activation_checkpointing": "selective_op", "checkpoint_keep": ("collectives", "matmuls")},
        1,
    ),
    "experts, tensor": (SPARSE, TENSOR, {}, 1),
    "weights in 4 bits, tensor": (WIDE, TENSOR, IN_4_BITS, 1),
    "falcon": (family("falcon"), TENSOR, {}, 1),
    "rows cut": (MODEL, ROWS_CUT, {}, 2),
    "rows cut, ring": (MODEL, ROWS_CUT, {"context_parallel_method": "ring"}, 1),
    "rows cut, ulysses": (MODEL, ROWS_CUT, {"context_parallel_method": "ulysses", **BF16}, 1),
    "rows cut, halo, full": (MODEL, ROWS_CUT, {"context_parallel_method": "halo", **FULL}, 1),
    "rows cut, selective": (MODEL, ROWS_CUT, {"activation_checkpointing": "selective_op"}, 1),
    "llama, rows cut": (family("llama"), ROWS_CUT, {}, 1),
    "lfm2, rows cut": (family("lfm2", layer_types=["conv", "full_attention"] * 2), ROWS_CUT, {}, 1),
    "jamba, rows cut, full": (family("jamba"), ROWS_CUT, FULL, 1),
    "1F1B": (MODEL, STAGES, {}, 4),
    "GPipe": (MODEL, STAGES, {"pipeline_schedule": "gpipe"}, 4),
    "zero bubble": (MODEL, STAGES, {"pipeline_schedule": "zbv_zero_bubble"}, 4),
    "interleaved": (MODEL, STAGES, {"pipeline_schedule": "interleaved_1f1b"}, 4),
    "llama, 1F1B": (family("llama"), STAGES, {}, 4),
}
OF_FOUR: dict[str, Case] = {
    "four shards": (MODEL, FSDP4, {}, 1),
    "tensor, sharded, chunked loss": (MODEL, Layout(dp_shard=2, tp=2), {"loss_chunks": 4, **BF16}, 2),
    "pipeline, tensor": (MODEL, Layout(dp_shard=1, pp=2, tp=2), {}, 4),
    "pipeline, rows cut": (MODEL, Layout(dp_shard=1, pp=2, cp=2), {}, 4),
    "pipeline, sharded, full": (MODEL, Layout(dp_shard=2, pp=2), {**BF16, **FULL}, 4),
}


def off(found: RankMemory, foreseen: RankMemory) -> dict[str, tuple[int, int]]:
    """What lies beyond the bounds: all together, or the most of a kind."""
    pairs = {str(kind): (found.most.get(kind, 0), size) for kind, size in foreseen.most.items()}
    small = 0.01 * found.total  # a kind of a few vectors, such as a message's indices
    beyond = {kind: pair for kind, pair in pairs.items() if abs(pair[0] - pair[1]) > max(KIND * min(pair), small)}
    total = (found.total, foreseen.total)
    return beyond | ({"together": total} if abs(total[0] - total[1]) > TOGETHER * total[0] else {})


def fullest_of_each_row(found: list[tuple[RankMemory, RankMemory]], ranks: int) -> list[tuple[RankMemory, RankMemory]]:
    """Of ranks that share rows, the one that holds most: their tokens lie differently, and the estimate is for all."""
    groups = [found[first : first + ranks] for first in range(0, len(found), ranks)]
    return [max(group, key=lambda pair: pair[0].total) for group in groups]


@pytest.mark.first("start frozen")
@pytest.mark.parametrize("name", ALONE)
def test_one_process_holds_what_was_estimated(measured, name):
    found, foreseen = compared(ALONE[name])
    assert found.most[MemoryUse.ACTIVATIONS] > 0
    if name in ("none", "llama"):
        assert foreseen.most[MemoryUse.GRADIENTS] == foreseen.most[MemoryUse.PARAMETERS]
    assert not off(found, foreseen)
    measured(name, "foreseen of found", {"together": foreseen.total / found.total})


@pytest.mark.all
@pytest.mark.parametrize("name", [*SHARDED, *CUT, *OF_FOUR])
def test_ranks_hold_what_was_estimated(spmd, measured, name):
    case = (SHARDED | CUT | OF_FOUR)[name]
    for found, foreseen in fullest_of_each_row(spmd(case[1].world, compared, case), case[1].cp):
        assert not off(found, foreseen)
        measured(name, "foreseen of found", {"together": foreseen.total / found.total})


@pytest.mark.all
@pytest.mark.parametrize(("name", "biases"), [("bloom", 4 * SEQ), ("gptj", 0)])
def test_masks_of_whole_rows_are_foreseen(spmd, name, biases):
    """They are kept from one microbatch to the next, so that an account of one step does not see them."""
    case = (family(name), Layout(dp_shard=1, cp=2), {}, 1)
    for found, foreseen in fullest_of_each_row(spmd(2, compared, case), 2):
        masks = 4 * ROWS * (SEQ * SEQ + biases)
        assert abs(foreseen.total - found.total - masks) <= TOGETHER * found.total


# --- mutants


def without(*names: str):
    """Techniques that the dry run leaves out."""
    return patch.object(dry_run, "ON_META", tuple(name for name in dry_run.ON_META if name not in names))


def without_recomputation():
    """The mode of activation checkpointing is ignored."""
    return without("activation_checkpoint")


def without_chunks():
    """The head's loss in chunks is ignored."""
    return without("fused_loss")


def without_optimizer_state():
    return patch.object(dry_run, "make_states", lambda optimizer: None)


def without_buckets():
    """DDP's buckets are taken for the gradients themselves."""
    return patch.object(dry_run, "keep_in_buckets", lambda *args, **options: None)


def all_rows_on_one_rank():
    """Experts of one rank get every token."""
    return patch.object(experts, "_rows_by_rank", lambda mine, theirs, ranks, rows: ([rows, 0], [rows, rows]))


def in_fp32():
    """Mixed precision is ignored."""
    on_cpu = dry_run._on_cpu
    return patch.object(
        dry_run,
        "_on_cpu",
        lambda made: replace(
            on_cpu(made), precision=replace(made.precision, compute="float32", cast_forward_inputs=False)
        ),
    )


def without_sharding():
    """Every rank is taken to hold whole parameters."""
    on_cpu = dry_run._on_cpu
    return patch.object(dry_run, "_on_cpu", lambda made: replace(on_cpu(made), data=DataParallel("none")))


MUTANTS: list[tuple[Callable[[], Any], str]] = [
    *(
        (without_recomputation, name)
        for name in ("full", "each second", "attention", "feed-forwards", "products kept", "offload")
    ),
    (without_chunks, "chunked loss"),
    (without_optimizer_state, "none"),
]
MUTANTS_OF_RANKS: list[tuple[Callable[[], Any], str]] = [
    (without_buckets, "replicated"),
    (all_rows_on_one_rank, "experts shared out"),
    (in_fp32, "parameters outweigh activations"),
    (without_sharding, "sharded"),
]


@pytest.mark.kills("memory", "mutant")
@pytest.mark.parametrize(("mutant", "name"), MUTANTS)
def test_a_switch_that_the_forecast_ignores_is_seen(mutant, name):
    with mutant():
        assert off(*compared(ALONE[name]))


def compared_as(mutant: Callable[[], Any], case: Case) -> tuple[RankMemory, RankMemory]:
    """The estimate is a mutant's, the run is not."""
    with mutant():
        foreseen = estimated(case)[2].of()
    return compared(case)[0], foreseen


@pytest.mark.kills("memory", "mutant")
@pytest.mark.parametrize(("mutant", "name"), MUTANTS_OF_RANKS)
def test_a_forecast_that_ignores_what_ranks_share_is_seen(spmd, mutant, name):
    case = (SHARDED | CUT | OF_FOUR)[name]
    assert all(off(*pair) for pair in spmd(case[1].world, compared_as, mutant, case))


# --- what it costs, and what it leaves alone


@pytest.mark.all
def test_a_large_model_takes_no_memory_and_seconds():
    facts = model_facts(as_module(SIZES["8B"]))
    batch = Batch(64, 4096, 1)
    made = plan(facts, Layout(dp_shard=64), techniques=BF16)
    before = time.process_time()
    (held,) = estimate_memory(facts, made, batch).ranks
    assert time.process_time() - before < 20, "two seconds on an idle machine"
    assert 20 << 30 < held.most[MemoryUse.ACTIVATIONS] < 40 << 30
    assert held.most[MemoryUse.LOGITS] == 3 * 4096 * 128_256 * 4, "logits in fp32, their logarithms, and a gradient"
    assert held.most[MemoryUse.OPTIMIZER] == pytest.approx(plan_memory(made).optimizer, rel=1e-5)


@pytest.mark.all
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv_zero_bubble"])
def test_a_long_pipeline_is_known_from_a_few_ranks_and_microbatches(schedule, monkeypatch):
    """Run as it is, rank by rank with all its microbatches, it holds the same."""
    case = replace(MODEL, n_layers=12), Layout(dp_shard=1, pp=6), {"pipeline_schedule": schedule}, 30
    runs: list[tuple[int, int]] = []
    whole = dry_run.DryRun.run
    monkeypatch.setattr(
        dry_run.DryRun, "run", lambda self, rank, number: runs.append((rank, number)) or whole(self, rank, number)
    )
    few = estimated(case)[2].ranks
    assert len({rank for rank, _ in runs}) < 6 or schedule == "zbv_zero_bubble"
    assert all(number < 30 for _, number in runs)
    monkeypatch.setattr(pipeline_ranks, "DIRECT", 30)
    monkeypatch.setattr(pipeline_ranks, "composition", lambda pipeline, rank: rank)
    every = estimated(case)[2].ranks
    assert [memory.total for memory in few] == pytest.approx([memory.total for memory in every], rel=TOGETHER)


@pytest.mark.all
def test_a_compiled_models_memory_is_a_range_with_its_reason():
    estimate = estimated((MODEL, ONE, {"compile": True}, 1))[2]
    assert estimate.of().total == estimated((MODEL, ONE, {}, 1))[2].of().total
    assert estimate.least == (estimated((MODEL, ONE, FULL, 1))[2].of().total,)
    assert "the compiler chooses" in "".join(estimate.notes)


def on_gpus(techniques: dict[str, Any]) -> MemoryEstimate:
    facts = model_facts(as_module(MODEL))
    made = plan(facts, FSDP2, techniques=techniques, cluster=Cluster(2, 2, "cuda"))
    return estimate_memory(facts, made, Batch(2 * ROWS, SEQ, ROWS))


@pytest.mark.all
def test_host_memory_is_no_part_of_a_gpus_peak():
    whole = on_gpus({}).of()
    states = sum(whole.most[kind] for kind in (MemoryUse.OPTIMIZER,)) + plan_memory(on_gpus_plan()).parameters
    offloaded = on_gpus({"cpu_offload": True}).of()
    assert MemoryUse.OPTIMIZER not in offloaded.most and MemoryUse.HOST not in offloaded.peak
    assert offloaded.most[MemoryUse.HOST] >= states
    assert offloaded.total < whole.total - 0.9 * states
    activations = on_gpus({"activation_checkpointing": "offload"}).of()
    assert activations.most[MemoryUse.HOST] > 0 and activations.total < whole.total
    optimizer = on_gpus({"cpu_offload": "optimizer"}).of()
    assert optimizer.most[MemoryUse.HOST] == whole.most[MemoryUse.OPTIMIZER]


def on_gpus_plan() -> Plan:
    return plan(MODEL, FSDP2, cluster=Cluster(2, 2, "cuda"))


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_low_bit_states_have_their_bytes(bits):
    pytest.importorskip("torchao")
    made, _, estimate = estimated((WIDE, ONE, {"optimizer_state": bits}, 1))
    assert estimate.of().most[MemoryUse.OPTIMIZER] == pytest.approx(plan_memory(made).optimizer, rel=1e-3)


@pytest.mark.all
def test_the_model_is_left_as_it_is():
    model = as_module(MODEL)
    made = plan(model, TENSOR, techniques=FULL)
    names, state = [name for name, _ in model.named_parameters()], torch.get_rng_state()
    estimate_memory(model_facts(model), made, Batch(ROWS, SEQ))
    assert [name for name, p in model.named_parameters() if p.is_meta] == names and model.get_parameter(
        "embedding.weight"
    ).shape == (VOCABULARY, 64)
    assert not any(vars(module).get("forward") for module in model.modules()) and torch.equal(
        torch.get_rng_state(), state
    )
    real = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    weight = real[0].weight
    estimate_memory(model_facts(real), plan(real, ONE), Batch(1, 4))
    assert real[0].weight is weight and weight.device.type == "cpu" and type(weight) is nn.Parameter


class WideInEvaluation(nn.Module):
    """Averages many copies of what it computes where it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden if self.training else hidden.expand(1000, *hidden.shape).contiguous().mean(0))


def test_an_evaluation_that_holds_more_than_a_step_is_what_was_estimated():
    model = WideInEvaluation()
    made, batch = plan(model, ONE), Batch(2 * ROWS, SEQ, ROWS)
    estimate = estimate_memory(model_facts(model), made, batch, keys=("tokens", "labels"))
    laid = parallelize(model, plan=made, microbatch_rows=ROWS)
    optimizer = default_optimizer(laid)
    rows = dict(RandomBatches(VOCABULARY, rows=batch.global_rows, seq_len=SEQ, keys=())(0))
    laid.forward_backward(rows)
    laid.optimizer_step(optimizer)
    found = of_evaluation(laid, optimizer, rows)
    assert found > 1000 * ROWS * SEQ * 16 * 4
    assert estimate.of().total == pytest.approx(found, rel=TOGETHER)


class Slow(nn.Module):
    """Its forward goes through the tokens one by one, and draws numbers that are not torch's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x, state, states = self.embedding(tokens), 0.0, []
        for place in range(tokens.shape[1]):
            state = torch.tanh(state + x[:, place])
            states.append(state * (random.random() < 2))
        return self.head(torch.stack(states, 1))


def test_a_forward_of_very_many_operators_is_not_waited_for(monkeypatch):
    assert estimated((Slow(), ONE, {}, 1))[2].ranks, "few are played"
    monkeypatch.setattr(fake, "PATIENCE", 100)
    monkeypatch.setattr(fake, "PATIENCE_PER_BLOCK", 0)
    drawn = random.getstate()
    estimate = estimated((Slow(), ONE, {}, 1))[2]
    assert estimate.ranks == () and "more than 100 operators" in estimate.why_not and random.getstate() == drawn


def test_a_function_that_holds_on_to_the_model_leaves_no_gradient_there():
    model = Slow()
    own = model.head.forward
    model.head.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    assert estimated((model, ONE, {}, 1))[2].ranks, "a copy's function holds on to the copy"
    model.head.forward = lru_cache(0)(model.head.forward)  # type: ignore[method-assign]  (Python copies no such)
    kept = model.head.weight.grad = torch.ones_like(model.head.weight)
    estimate = estimated((model, ONE, {}, 1))[2]
    assert model.head.weight.grad is kept and all(p.grad is None for p in model.embedding.parameters())
    assert estimate.ranks == () and "computes with the model itself" in estimate.why_not


def test_a_buffer_that_modules_share_is_held_once():
    model, table = Slow(), torch.zeros(1000)
    for module in (model.embedding, model.head):
        module.register_buffer("table", table)
    for layout in (ONE, FSDP2):
        ranks = estimated((model, layout, {}, 1))[2].ranks
        assert ranks[0].most[MemoryUse.BUFFERS] == table.nbytes


class Odd(nn.Module):
    """Its forward looks at values."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if x.sum() > 0 else -x)


def test_what_cannot_be_known_is_left_out_and_said():
    estimate = estimated((Odd(), ONE, {}, 1))[2]
    assert estimate.ranks == () and estimate.of().total == 0
    assert "Odd cannot be run on tensors without values (DataDependentOutputException" in estimate.why_not
