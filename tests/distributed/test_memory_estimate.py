"""What a step holds of activations and logits was foreseen, before any process group existed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.families import config_of
from support.laid_out import own_rows
from torch import Tensor, nn

from meshwright import Layout
from meshwright.distributed.memory import account as memory_account
from meshwright.distributed.memory import dry_run, fake, repeated_blocks
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.memory.dry_run import estimate_memory
from meshwright.distributed.mesh import get_pp_rank
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process.wire import WireCounter
from meshwright.introspection.facts import model_facts
from meshwright.introspection.huggingface import CausalLM
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.memory.bounds import least_bytes, most_bytes
from meshwright.planning.memory.step import MemoryEstimate, MemoryUse
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches

VOCABULARY, SEQ, ROWS = 258, 64, 4
MODEL = DecoderConfig(VOCABULARY, 64, 6, 4, 2, 128, SEQ)
WIDE = DecoderConfig(VOCABULARY, 256, 3, 4, 2, 1024, SEQ)
SPARSE = DecoderConfig(VOCABULARY, 64, 4, 4, 2, 128, SEQ, moe=MoEConfig(n_experts=8))
BOUND = 1.03
"""Either way.

Both accounts look where there may be 1 % more than ever; what is left is FSDP2's and DDP's, a few vectors long.
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
Case = tuple[Any, Layout, dict[str, Any], int]
"""Model, layout, techniques, microbatches."""


def family(name: str, **changes: Any) -> Callable[[], CausalLM]:
    """Made where it is used: to list the tests takes no transformers."""
    return partial(_family, name, **changes)


def _family(name: str, **changes: Any) -> CausalLM:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "hidden_size": 64, "num_hidden_layers": 4}
    return CausalLM(config_of(name, **sizes | changes))


def of(case: Case) -> Case:
    """The case, with its model made."""
    return (case[0]() if isinstance(case[0], partial) else case[0], *case[1:])


def keys_of(model: Any, layout: Layout) -> tuple[str, ...]:
    if layout.cp > 1:
        return ()  # documents decide who has which token, and what travels
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


def compared(case: Case) -> dict[MemoryUse, tuple[int, int]]:
    """By kind: bytes found in a first step, bytes foreseen."""
    case = of(case)
    model, layout, *_ = case
    made, batch, estimate = estimated(case)
    laid = parallelize(model, layout if layout.world > 1 else None, plan=made, seed=1, microbatch_rows=ROWS)
    rows = own_rows(
        laid, dict(RandomBatches(VOCABULARY, rows=batch.global_rows, seq_len=SEQ, keys=keys_of(model, layout))(0))
    )
    account = MemoryAccount(laid.parts, dims_of_logits(VOCABULARY, layout.tp))
    with patch.object(memory_account, "LOOKS_EVERY", 1), account:
        laid.forward_backward(rows)
    assert not estimate.why_not, estimate.why_not
    held = estimate.of(get_pp_rank(laid.mesh) if laid.plan.pipeline is not None else None)
    return {kind: (account.most[kind], size) for kind, size in held.items()}


def bounded(case: Case) -> tuple[int, int, int]:
    """Bytes that this rank holds in its second step: at least, found, at most."""
    case = of(case)
    model, layout, *_ = case
    made, batch, estimate = estimated(case)
    laid = parallelize(model, layout if layout.world > 1 else None, plan=made, seed=1, microbatch_rows=ROWS)
    rows = own_rows(
        laid, dict(RandomBatches(VOCABULARY, rows=batch.global_rows, seq_len=SEQ, keys=keys_of(model, layout))(0))
    )
    optimizer = torch.optim.AdamW(laid.parameters())
    laid.forward_backward(rows)
    laid.optimizer_step(optimizer)
    optimizer.zero_grad()
    account = MemoryAccount(laid.parts, dims_of_logits(VOCABULARY, layout.tp), looks_every=1)
    with account:
        laid.forward_backward(rows)
    account.add_optimizer(optimizer)
    place = get_pp_rank(laid.mesh) if laid.plan.pipeline is not None else 0
    # messages are no part of the estimate
    least, most = (bound(made, batch, estimate)[place].host for bound in (least_bytes, most_bytes))
    found = account.most_together + account.most[MemoryUse.OPTIMIZER]
    return least, found, most + account.most[MemoryUse.COMMUNICATION]


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
    "replicated": (MODEL, Layout(dp_replicate=2, dp_shard=1), {}, 2),
    "experts, full": (SPARSE, FSDP2, FULL, 1),
    "gpt_neox, full": (family("gpt_neox"), FSDP2, FULL, 1),
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


def off(found: dict[MemoryUse, tuple[int, int]]) -> dict[MemoryUse, tuple[int, int]]:
    """What lies beyond the bound."""
    return {kind: pair for kind, pair in found.items() if max(pair) > BOUND * min(pair)}


def one_of_each_row(
    found: list[dict[MemoryUse, tuple[int, int]]], ranks: int
) -> list[dict[MemoryUse, tuple[int, int]]]:
    """Of ranks that share rows, the one that holds most: their tokens lie differently, and the estimate is for all."""
    groups = [found[first : first + ranks] for first in range(0, len(found), ranks)]
    return [max(group, key=lambda held: held[MemoryUse.ACTIVATIONS][0]) for group in groups]


@pytest.mark.parametrize("name", ALONE)
def test_one_process_holds_what_was_estimated(measured, name):
    found = compared(ALONE[name])
    assert found.keys() == {MemoryUse.ACTIVATIONS, MemoryUse.LOGITS} and found[MemoryUse.ACTIVATIONS][0] > 0
    assert not off(found)
    measured(name, "foreseen of found", {str(kind): size / max(here, 1) for kind, (here, size) in found.items()})


@pytest.mark.parametrize("name", [*SHARDED, *CUT, *OF_FOUR])
def test_ranks_hold_what_was_estimated(spmd, measured, name):
    case = (SHARDED | CUT | OF_FOUR)[name]
    for found in one_of_each_row(spmd(case[1].world, compared, case), case[1].cp):
        assert not off(found)
        measured(name, "foreseen of found", {str(kind): size / max(here, 1) for kind, (here, size) in found.items()})


BOUNDED = ("none", "several microbatches", "full", "chunked loss", "ZeRO-1", "ZeRO-2", "replicated", "1F1B")


@pytest.mark.parametrize("name", BOUNDED)
def test_what_ranks_hold_lies_between_the_bounds(spmd, name):
    case = (ALONE | SHARDED | CUT | OF_FOUR)[name]
    found = spmd(case[1].world, bounded, case) if case[1].world > 1 else [bounded(case)]
    for least, held, most in found:
        assert least <= held <= BOUND * most
        assert 0.6 * held < least and most < 1.9 * held


# --- mutants


def without_recomputation():
    """The mode of activation checkpointing is ignored."""
    return patch.object(dry_run, "BEHIND_THE_CUT", ("fused_loss",))


def without_chunks():
    """The head's loss in chunks is ignored."""
    return patch.object(dry_run, "BEHIND_THE_CUT", ("activation_checkpoint",))


MUTANTS: list[tuple[Callable[[], Any], str]] = [
    *(
        (without_recomputation, name)
        for name in ("full", "each second", "attention", "feed-forwards", "products kept", "offload")
    ),
    (without_chunks, "chunked loss"),
]


@pytest.mark.kills("memory", "mutant")
@pytest.mark.parametrize(("mutant", "name"), MUTANTS)
def test_a_switch_that_the_forecast_ignores_is_seen(mutant, name):
    with mutant():
        assert off(compared(ALONE[name]))


def test_a_dtype_that_the_forecast_ignores_is_seen():
    case, whole = (MODEL, FSDP2, BF16, 1), dry_run.without_memory
    (right,) = estimated(case)[2].ranks
    in_fp32 = patch.object(dry_run, "without_memory", lambda module, dtype: whole(module, torch.float32))
    with in_fp32, patch.object(dry_run, "casting"):
        (wrong,) = estimated(case)[2].ranks
    assert off({MemoryUse.ACTIVATIONS: (right[MemoryUse.ACTIVATIONS], wrong[MemoryUse.ACTIVATIONS])})


# --- what it costs, and what it leaves alone


def test_a_large_model_takes_no_memory_and_about_a_second():
    facts = model_facts(as_module(SIZES["8B"]))
    batch = Batch(64, 4096, 1)
    made = plan(facts, Layout(dp_shard=64), techniques=BF16)
    before = time.process_time()
    (held,) = estimate_memory(facts, made, batch).ranks
    assert time.process_time() - before < 8, "half a second on an idle machine"
    assert 20 << 30 < held[MemoryUse.ACTIVATIONS] < 40 << 30
    assert held[MemoryUse.LOGITS] == 3 * 4096 * 128_256 * 4, "logits in fp32, their logarithms, and a gradient"


@pytest.mark.parametrize(
    "techniques",
    [
        {},
        FULL,
        {"activation_checkpointing": "every_n"},
        {"activation_checkpointing": "offload"},
        {"freeze": (r"layers\.[0-5]\.",)},
    ],
    ids=["none", "full", "each second", "offload", "frozen"],
)
@pytest.mark.parametrize("name", ["ours", "experts", "gemma2", "llama"])
def test_blocks_that_are_passed_over_are_counted(name, techniques):
    models = {"ours": replace(MODEL, n_layers=16), "experts": replace(SPARSE, n_layers=16)}
    case = models.get(name) or _family(name, num_hidden_layers=16), ONE, techniques, 1
    operators = []
    for played in (repeated_blocks.PLAYED, 99):
        with patch.object(repeated_blocks, "PLAYED", played), WireCounter() as wire:
            operators.append((estimated(case)[2].of(), sum(wire.operations.values())))
    (few, fewer), (all_of_them, operations) = operators
    assert not off({kind: (few[kind], all_of_them[kind]) for kind in all_of_them})
    assert fewer < operations


def test_the_model_is_left_as_it_is():
    model = as_module(MODEL)
    made = plan(model, TENSOR, techniques=FULL)
    names, state = [name for name, _ in model.named_parameters()], torch.get_rng_state()
    estimate_memory(model_facts(model), made, Batch(ROWS, SEQ))
    assert [name for name, p in model.named_parameters() if p.is_meta] == names and model.get_parameter(
        "embedding.weight"
    ).shape == (
        VOCABULARY,
        64,
    )
    assert not any(vars(module).get("forward") for module in model.modules()) and torch.equal(
        torch.get_rng_state(), state
    )
    real = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    weight = real[0].weight
    estimate_memory(model_facts(real), plan(real, ONE), Batch(1, 4))
    assert real[0].weight is weight and weight.device.type == "cpu" and type(weight) is nn.Parameter


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
    drawn = random.getstate()
    estimate = estimated((Slow(), ONE, {}, 1))[2]
    assert estimate.ranks == () and "more than 100 operators" in estimate.why_not and random.getstate() == drawn


def test_a_function_that_holds_on_to_the_model_leaves_no_gradient_there():
    model = Slow()
    own = model.head.forward
    model.head.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    kept = model.head.weight.grad = torch.ones_like(model.head.weight)
    estimate = estimated((model, ONE, {}, 1))[2]
    assert model.head.weight.grad is kept and all(p.grad is None for p in model.embedding.parameters())
    assert estimate.ranks == () and "computes with the model itself" in estimate.why_not


class Odd(nn.Module):
    """Its forward looks at values."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if x.sum() > 0 else -x)


def test_what_cannot_be_known_is_left_out_and_said():
    reasons = {
        "experts (layout.ep = 2) depends on what routers choose": (SPARSE, Layout(dp_shard=2, ep=2), {}, 1),
        "compiled blocks": (MODEL, ONE, {"compile": True}, 1),
        "the schedule zbv_zero_bubble defers the gradients of weights": (
            MODEL,
            STAGES,
            {"pipeline_schedule": "zbv_zero_bubble"},
            4,
        ),
        "Odd cannot be run on tensors without values (DataDependentOutputException": (Odd(), ONE, {}, 1),
    }
    for why, case in reasons.items():
        estimate = estimated(case)[2]
        assert estimate.ranks == () and estimate.of() == {} and why in estimate.why_not
