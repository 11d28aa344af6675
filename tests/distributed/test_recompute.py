"""Activation checkpointing, each mode: equal to one process, sends what the plan said, keeps what it promises."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import Figures, assert_estimated, counted, estimated, own_rows
from support.recomputed import backward, built, gradients, kept_bytes, operations
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint

from meshwright import ConfigError, UnsupportedError
from meshwright.distributed import apply_ac
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.recompute import kept, recompute
from meshwright.distributed.recompute import recompute as host_activations
from meshwright.distributed.transforms import apply_model_transforms
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.models.layers import Router, is_recomputing
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

VOCABULARY = 64
DENSE = DecoderConfig(VOCABULARY, 16, 4, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=20, qk_norm=True)
SPARSE = replace(DENSE, moe=MoEConfig(n_experts=8, hidden_dim=12, sequence_loss=0.05, z_loss=0.01, batch_loss=0.1))
BATCHES = RandomBatches(VOCABULARY, rows=8, seq_len=9)
FSDP2, HSDP, TP2 = Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=1, tp=2)
PP2, EP2 = Layout(pp=2, dp_shard=1), Layout(dp_shard=2, ep=2)
LAYOUTS = {"fsdp2": FSDP2, "hsdp": HSDP, "tp2": TP2, "pp2": PP2, "ep2": EP2}

EVERY_N: dict[str, Any] = {"activation_checkpointing": "every_n"}
MODULES: dict[str, Any] = {"activation_checkpointing": "modules", "checkpoint_modules": ("layers.*.feed_forward",)}
BY_OPERATOR: dict[str, Any] = {"activation_checkpointing": "selective_op"}
NOT_SENT: dict[str, Any] = {**BY_OPERATOR, "checkpoint_keep": ("attention", "matmuls"), "checkpoint_keep_every": 1}
OFFLOAD: dict[str, Any] = {"activation_checkpointing": "offload"}
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
BUDGET: dict[str, Any] = {**COMPILED, "activation_checkpointing": "memory_budget"}
SPLIT: dict[str, Any] = {"pipeline_schedule": "zbv_zero_bubble"}

MODES = {"every_n": EVERY_N, "modules": MODULES, "selective_op": BY_OPERATOR, "offload": OFFLOAD}

WAYS: dict[str, tuple[Layout, dict[str, Any]]] = {
    **{f"memory_budget, {name}": (LAYOUTS[name], BUDGET) for name in ("fsdp2", "pp2", "ep2")},
    "selective_op, what is sent is sent again": (TP2, NOT_SENT),
    "selective_op, compiled, tp2": (TP2, BY_OPERATOR | COMPILED),
    "selective_op, compiled, ep2": (EP2, BY_OPERATOR | COMPILED),
}


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_a_mode_is_equal_to_one_process(pool, name):
    layout, techniques = WAYS[name]
    model = SPARSE if layout.ep > 1 else DENSE
    report = verify(
        model, layout, BATCHES, techniques=techniques, steps=1, dtypes=("float64",), microbatch_rows=2, pool=pool
    )
    assert report, str(report)


# --- what travels


def one_step(
    model: DecoderConfig, layout: Layout, techniques: dict[str, Any], fault: str = ""
) -> tuple[Figures, Figures]:
    """What the plan foresees for this rank and what it sent."""
    with FAULTS[fault]() if fault else nullcontext():
        laid = parallelize(model, layout, techniques=techniques, seed=3)
        optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
        counters = [WireCounter(), WireCounter()]
        for step, wire in enumerate(counters):
            with wire:
                laid.forward_backward(own_rows(laid, dict(RandomBatches(VOCABULARY, 8, 9)(step))))
                laid.optimizer_step(optimizer, 1.0)
    return estimated(laid.plan, Batch(8, 9)), counted(counters[-1])


def sends_again() -> Any:
    return patch.object(kept.Results, "take", lambda self, key: None)


FAULTS = {"sends again": sends_again}

WIRE: dict[str, tuple[DecoderConfig, Layout, dict[str, Any]]] = {
    "selective_op, compiled": (DENSE, TP2, BY_OPERATOR | COMPILED),
    "selective_op, what is sent is sent again": (DENSE, TP2, NOT_SENT),
    "selective_op, ep2, what is sent is sent again": (SPARSE, EP2, NOT_SENT),
}


def assert_sent(planned: Figures, sent: Figures) -> None:
    """As foreseen; of tokens to experts only how often, since how many follows from the routing."""
    alike = {key: (calls, planned[key][1] if key[0] == "all_to_all" else moved) for key, (calls, moved) in sent.items()}
    assert_estimated(planned, alike)


@pytest.mark.all
@pytest.mark.parametrize("name", WIRE)
def test_what_travels_is_what_the_plan_said(spmd, name):
    model, layout, techniques = WIRE[name]
    for planned, sent in spmd(layout.world, one_step, model, layout, techniques):
        assert_sent(planned, sent)


@pytest.mark.all
@pytest.mark.parametrize(("model", "layout"), [(DENSE, TP2), (SPARSE, EP2)], ids=["tp2", "ep2"])
def test_what_is_kept_is_not_sent_again(spmd, model, layout):
    plain, by_operator = (spmd(layout.world, one_step, model, layout, requested) for requested in ({}, BY_OPERATOR))
    full = spmd(layout.world, one_step, model, layout, {"activation_checkpointing": "full"})
    for (_, one), (_, other), (_, most) in zip(plain, by_operator, full, strict=True):
        assert one == other
        assert sum(moved for _, moved in most.values()) > sum(moved for _, moved in other.values())


@pytest.mark.all
@pytest.mark.parametrize(("model", "layout"), [(DENSE, TP2), (SPARSE, EP2)], ids=["tp2", "ep2"])
def test_a_kept_exchange_that_is_sent_again_is_seen(spmd, model, layout):
    for planned, sent in spmd(layout.world, one_step, model, layout, BY_OPERATOR, "sends again"):
        with pytest.raises(AssertionError):
            assert_sent(planned, sent)


# --- what is computed again, in one process

MM, TOPK = "aten.mm.default", "aten.topk.default"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
PRODUCTS = 7
"""Of a block: q, k, v, o; gate, up, down."""


@pytest.mark.first("{'activation_checkpointing': 'every_n', 'checkpoint_every': 3}-6-1")
@pytest.mark.parametrize(
    ("techniques", "products", "attentions"),
    [
        ({"activation_checkpointing": "full"}, 4 * (PRODUCTS - 1), 4),  # the last one's result is in no backward
        (EVERY_N, 2 * (PRODUCTS - 1), 2),
        ({**EVERY_N, "checkpoint_every": 1}, 4 * (PRODUCTS - 1), 4),
        ({**EVERY_N, "checkpoint_every": 3}, PRODUCTS - 1, 1),
        (MODULES, 4 * 2, 0),
        (BY_OPERATOR, 4 * 3, 0),  # the first, third, fifth; the seventh is in no backward
        ({**BY_OPERATOR, "checkpoint_keep_every": 3}, 4 * 4, 0),
        ({**BY_OPERATOR, "checkpoint_keep_every": 1}, 0, 0),
        ({**BY_OPERATOR, "checkpoint_keep": ("attention",)}, 4 * (PRODUCTS - 1), 0),
        ({**BY_OPERATOR, "checkpoint_keep": ("aten.mm.default",)}, 0, 4),
        ({**BY_OPERATOR, "checkpoint_keep": ("aten.mm",)}, 0, 4),
        ({**BY_OPERATOR, "checkpoint_keep": (f"{__name__}:wide_products",)}, 4 * (PRODUCTS - 3), 4),
        (OFFLOAD, 0, 0),
    ],
    ids=str,
)
def test_so_much_is_computed_again_and_no_gradient_changes(techniques, products, attentions):
    plain, found = operations(DENSE, {}), operations(DENSE, techniques)
    assert found[MM] - plain[MM] == products
    assert found[ATTENTION] - plain[ATTENTION] == attentions
    wanted = gradients(DENSE, {})
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients(DENSE, techniques), wanted, strict=True))


def wide_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Those of gate and up."""
    is_wide = operator is torch.ops.aten.mm.default and args[1].shape[1] == DENSE.hidden_dim
    return CheckpointPolicy.MUST_SAVE if is_wide else CheckpointPolicy.PREFER_RECOMPUTE


def saves_views(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.t.default else CheckpointPolicy.PREFER_RECOMPUTE


def offloads(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_CPU_OFFLOAD


@pytest.mark.parametrize(
    ("function", "words"), [("saves_views", "has no result of its own"), ("offloads", "can save or recompute")]
)
def test_a_policy_that_asks_for_what_cannot_be_kept_is_refused(function, words):
    with pytest.raises(UnsupportedError, match=words):
        gradients(DENSE, {**BY_OPERATOR, "checkpoint_keep": (f"{__name__}:{function}",)})


# --- which experts

KEEPING_CHOICE = {**BY_OPERATOR, "checkpoint_keep": ("topk",)}


def chosen_otherwise_when_recomputed() -> Any:
    """Rounding, much enlarged: in the backward's forward tokens would choose other experts."""
    choose = Router._choose
    return patch.object(Router, "_choose", lambda self, scores: choose(self, -scores if is_recomputing() else scores))


@pytest.mark.all
def test_recomputed_tokens_go_to_the_same_experts():
    wanted = gradients(SPARSE, {})
    with chosen_otherwise_when_recomputed():
        found = gradients(SPARSE, KEEPING_CHOICE)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert operations(SPARSE, KEEPING_CHOICE)[TOPK] == operations(SPARSE, {})[TOPK] == SPARSE.n_layers


def test_without_the_choice_kept_they_would_not():
    with chosen_otherwise_when_recomputed(), pytest.raises(CheckpointError, match="different metadata"):
        gradients(SPARSE, {**KEEPING_CHOICE, "checkpoint_keep": ("attention",)})


# --- random numbers, and results that are written into


class Block(nn.Module):
    """A random operator whose result can be kept, a product that is written into, and dropout behind both.

    A product leaves it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.native_dropout(self.one(x), 0.5, True)[0]
        y = self.two(x)
        y += x
        y = F.dropout(torch.tanh(y), 0.5, self.training)
        y = self.one(y)
        return y, torch.tanh(y).sum()


class Stacked(nn.Module):
    """Writes into what its blocks return, a product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens), torch.zeros((), dtype=self.embed.weight.dtype)
        for layer in self.layers:
            x, more = layer(x)
            x.mul_(1.5)
            total = total + more
        return x.square().sum() + total


KEEPING_DRAWS = {
    **BY_OPERATOR,
    "checkpoint_keep": ("matmuls", "aten.native_dropout.default"),
    "checkpoint_keep_every": 1,
}


def drawn(techniques: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Stacked().double()
    recompute.apply(model, plan(model, Layout(dp_shard=1), techniques=techniques))
    torch.manual_seed(1)
    model(torch.arange(16).view(2, 8)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def agree(techniques: dict[str, Any]) -> bool:
    wanted = drawn({})
    return all(torch.equal(mine, theirs) for mine, theirs in zip(drawn(techniques), wanted, strict=True))


RANDOM = [
    {"activation_checkpointing": "full"},
    EVERY_N,
    {**MODULES, "checkpoint_modules": ("layers.0", "layers.1.two")},
    BY_OPERATOR,
    KEEPING_DRAWS,
    OFFLOAD,
]


@pytest.mark.parametrize("techniques", RANDOM, ids=str)
def test_random_numbers_and_what_is_written_into_stay_as_they_were(techniques):
    assert agree(techniques)


@pytest.mark.kills("recompute", "mutant")
@pytest.mark.parametrize(
    ("mutant", "techniques"),
    [
        (lambda: patch.object(kept.SavedResult, "__init__", partial_keep), KEEPING_DRAWS),
        (lambda: patch.object(recompute, "checkpoint", partial(checkpoint, preserve_rng_state=False)), EVERY_N),
        (lambda: patch.object(kept.Results, "before_write", lambda self, tensors: None), KEEPING_DRAWS),
        (
            lambda: patch.object(recompute, "leaving", lambda output: output),
            {**KEEPING_DRAWS, "checkpoint_keep": ("matmuls",)},
        ),
    ],
    ids=["the stream is left behind", "another mask", "what is kept is not copied", "what leaves is not copied"],
)
def test_a_mutant_draws_or_hands_back_something_else(mutant, techniques):
    assert agree(techniques)
    with mutant():
        assert not agree(techniques)


keep_whole = kept.SavedResult.__init__


def partial_keep(self: Any, made: Any, drew: bool) -> None:
    keep_whole(self, made, False)


# --- host memory


def test_every_tensor_comes_back_to_its_place_and_a_mutant_shows():
    wanted = gradients(DENSE, {})
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients(DENSE, OFFLOAD), wanted, strict=True))
    keep = host_activations.BlockForward.keep

    def by_shape(self: Any, tensor: Tensor) -> Any:
        found = keep(self, tensor)
        return next(key for key in self.slots if key[3] == found[3])

    with patch.object(host_activations.BlockForward, "keep", by_shape):
        found = gradients(DENSE, OFFLOAD)
    assert not all(torch.allclose(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_what_lies_elsewhere_stays_and_what_is_saved_twice_leaves_once():
    left: list[Tensor] = []
    leave = host_activations.Copies.leave

    def noting(self: Any, tensor: Tensor) -> Tensor:
        left.append(tensor)
        return leave(self, tensor)

    with patch.object(host_activations.Copies, "leave", noting):
        model = built(DENSE, OFFLOAD)
        backward(model)
    lying = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert left and not [
        t for t in left if t.untyped_storage().data_ptr() in lying or t.nbytes < host_activations.LEAST_BYTES
    ]


def test_the_block_before_is_fetched_while_a_block_s_backward_runs():
    order: list[tuple[str, int]] = []
    fetch, take = host_activations.BlockForward.fetch, host_activations.BlockForward.take

    def fetching(self: Any) -> None:
        if not self.is_here:
            order.append(("fetch", self.number))
        fetch(self)

    def taking(self: Any, key: Any) -> Tensor:
        if ("take", self.number) not in order:
            order.append(("take", self.number))
        return take(self, key)

    with patch.multiple(host_activations.BlockForward, fetch=fetching, take=taking):
        gradients(DENSE, OFFLOAD)
    assert order == [("take", 3), ("fetch", 2), ("take", 2), ("fetch", 1), ("take", 1), ("fetch", 0), ("take", 0)]


# --- how much is kept

LARGE = DecoderConfig(VOCABULARY, 64, 8, n_heads=4, n_kv_heads=2, hidden_dim=160, max_seq_len=64)
ROWS, SEQ = 4, 64
INPUT = ROWS * SEQ * LARGE.dim * 4
"""Bytes of a block's input."""


def of_a_block(techniques: dict[str, Any]) -> float:
    """Bytes that one more block keeps for backward."""
    more, fewer = LARGE.n_layers, LARGE.n_layers // 2
    deep, flat = (kept_bytes(replace(LARGE, n_layers=n), techniques, ROWS, SEQ) for n in (more, fewer))
    return (deep - flat) / (more - fewer)


@pytest.mark.all
def test_a_mode_keeps_what_it_promises(measured):
    found = {mode: of_a_block(requested) for mode, requested in MODES.items()}
    found |= {mode: of_a_block({"activation_checkpointing": mode}) for mode in ("none", "full", "selective")}
    assert INPUT <= found["full"] <= 1.01 * INPUT
    assert found["full"] < found["selective_op"] < found["none"]
    assert found["every_n"] == pytest.approx((found["full"] + found["none"]) / 2, rel=0.01)
    assert found["full"] < found["modules"] < found["none"]
    whole = {mode: kept_bytes(LARGE, {"activation_checkpointing": mode}, ROWS, SEQ) for mode in ("full", "offload")}
    assert whole["offload"] <= whole["full"] + found["none"]
    assert found["offload"] <= 0.05 * INPUT, "another block keeps nothing but what is small"


# --- doors


@pytest.mark.parametrize(
    ("mode", "words"), [("modules", "none is named. Name some, such as layers.*"), ("memory_budget", "compile = true")]
)
def test_a_door_says_what_a_mode_needs(mode, words):
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        apply_ac(Stacked(), mode)


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({"ops_to_save": ["aten.mm"]}, 0),
        ({"ops_to_save": ["attention"]}, 4 * (PRODUCTS - 1)),
        ({"layer_classes": ["meshwright.models.layers.FeedForward"]}, 4 * 2),
        ({"layer_classes": ["meshwright.models.layers.FeedForward"], "ops_to_save": ["aten.mm.default"]}, 0),
    ],
    ids=str,
)
def test_the_transform_keeps_the_operators_that_it_is_told(options, products):
    plain, model = built(DENSE, {}), apply_model_transforms(built(DENSE, {}), {"activation_checkpoint": options})
    with WireCounter() as wire:
        found = backward(model)
    assert wire.operations[MM] - operations(DENSE, {})[MM] == products
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, backward(plain), strict=True))


def saved_bytes(model: nn.Module) -> int:
    """By the graph, parameters not counted."""
    lying = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        backward(model)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in lying)


def within(budget: float | None) -> int:
    torch._dynamo.reset()
    options = {"compile_kwargs": {"backend": "aot_eager"}, "activation_memory_budget": budget}
    return saved_bytes(apply_model_transforms(built(DENSE, {}), {"compile": options}))


@pytest.mark.all
def test_a_smaller_budget_keeps_less():
    free, most, some, least = (within(budget) for budget in (None, 0.9, 0.5, 0.1))
    assert free > most > some > least


class Dropping(nn.Module):
    """No layer of it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), 0.5, self.training)


@pytest.mark.all
def test_a_budget_refuses_a_block_that_draws_before_anything_is_trained():
    torch._dynamo.reset()
    model = nn.Sequential(nn.ModuleList(Dropping() for _ in range(2)))
    made = plan(model, Layout(dp_shard=1), techniques=BUDGET)
    block = recompute.compile_blocks(model, made).get_submodule("0.0")
    with torch.no_grad():
        block(torch.ones(2, 8))
    with pytest.raises(UnsupportedError, match="Dropping draws random numbers"):
        block(torch.ones(2, 8))
    assert block.eval()(torch.ones(2, 8)).requires_grad


@pytest.mark.parametrize("techniques", [BY_OPERATOR, OFFLOAD], ids=str)
def test_nothing_is_kept_where_no_gradient_flows(techniques):
    frozen = {**techniques, "freeze": ("embedding", r"layers\.[0-6]\.")}
    one_trained = kept_bytes(replace(LARGE, n_layers=1), techniques, ROWS, SEQ)
    assert kept_bytes(replace(LARGE, n_layers=8), frozen, ROWS, SEQ) <= 1.05 * one_trained
