"""Experts in real processes: equal to one process in every layout, nothing sent in vain, and checkpoints that keep
every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support import families
from support.heard import heard
from support.laid_out import Figures, Held, assert_estimated, assert_same, counted, estimated, held, own_rows
from support.ranks import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import ConfigError
from meshwright.checkpoint import load, save
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import apply_expert_parallel, apply_fsdp2, apply_tensor_parallel, init_distributed
from meshwright.distributed import experts as expert_parallel
from meshwright.distributed import experts as routing
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.mesh import data_position, get_ep_mesh
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.step.batch import labels_of
from meshwright.distributed.tensor.layers import LocalView
from meshwright.distributed.weights import constructed
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.source import CausalLM
from meshwright.introspection.structure.experts import Stack
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.models.layers import Router
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

VOCABULARY = 61
DENSE = DecoderConfig(VOCABULARY, 16, 4, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=20, qk_norm=True)
SOFTMAX = replace(DENSE, moe=MoEConfig(n_experts=8, hidden_dim=12, sequence_loss=0.05, z_loss=0.01))
SIGMOID = replace(
    DENSE,
    moe=MoEConfig(
        n_experts=8,
        top_k=3,
        hidden_dim=12,
        n_shared=1,
        first_dense=1,
        router="sigmoid",
        n_groups=4,
        top_groups=2,
        scale=2.5,
        bias_rate=0.01,
        sequence_loss=0.05,
    ),
)
BATCHED = replace(DENSE, moe=MoEConfig(n_experts=8, hidden_dim=12, batch_loss=0.3))
CAPPED = replace(DENSE, moe=MoEConfig(n_experts=4, hidden_dim=12, capacity_factor=1.0, bias_rate=0.01))
UNEVEN = replace(DENSE, moe=MoEConfig(n_experts=6, hidden_dim=12, n_shared=1))
"""Stacks that are cut inside their experts over 4 ranks, and over 2 in a half of the experts."""
BATCHES = RandomBatches(VOCABULARY, rows=8, seq_len=9)

ONE = Layout(dp_shard=1)
EP2, EP4, HALVES = Layout(dp_shard=2, ep=2), Layout(dp_shard=4, ep=4), Layout(dp_shard=4, ep=2)
HYBRID = Layout(dp_replicate=2, dp_shard=2, ep=2)
TENSOR, ACROSS = Layout(dp_shard=2, tp=2, ep=2), Layout(dp_shard=2, tp=2, ep=4)
STAGED = Layout(pp=2, dp_shard=2, ep=2)
SHARDED = Layout(dp_shard=4)
FULL = {"activation_checkpointing": "full"}

WAYS: dict[str, tuple[DecoderConfig, Layout, dict[str, Any]]] = {
    "capped, ep2": (CAPPED, EP2, {}),
    "halves": (SIGMOID, HALVES, {}),
    "tensor, ep2": (SIGMOID, TENSOR, {}),
    "1f1b": (SIGMOID, STAGED, {}),
    "resharded to 2": (SOFTMAX, HALVES, {"reshard_after_forward": 2}),
    "balanced by batch": (BATCHED, EP2, {}),
    "balanced by microbatch": (BATCHED, HYBRID, {}),
    "balanced by microbatch, replicas": (BATCHED, Layout(dp_replicate=2, dp_shard=1), FULL),
    "balanced by microbatch, tensor": (BATCHED, TENSOR, FULL),
    "balanced by microbatch, 1f1b": (BATCHED, STAGED, {}),
    "balanced, zbv": (BATCHED, STAGED, {"pipeline_schedule": "zbv_zero_bubble"}),
    "balanced, compiled": (BATCHED, EP2, {"compile": True, "compile_backend": "aot_eager"}),
    "compiled": (SOFTMAX, EP2, {"compile": True, "compile_backend": "aot_eager"}),
    "compiled, whole stacks": (SIGMOID, Layout(dp_shard=2), {"compile": True, "compile_backend": "aot_eager"}),
    "experts frozen": (SIGMOID, EP2, {"freeze": (r"experts",)}),
    "all but experts frozen": (SIGMOID, EP2, {"freeze": (r"^(?!.*experts)",)}),
    "more owners than experts": (replace(SOFTMAX, moe=MoEConfig(n_experts=2, top_k=1, hidden_dim=12)), SHARDED, {}),
    "uneven, ep": (UNEVEN, HALVES, {}),
    "one expert for each rank": (replace(SOFTMAX, moe=MoEConfig(n_experts=4, top_k=1, hidden_dim=12)), EP4, {}),
}
"""Not in the array (test_ways): products in float32, which are grouped; a capacity; losses of microbatches; other parts
frozen.
"""
DTYPE_OF = dict.fromkeys(("compiled, whole stacks", "halves", "tensor, ep2", "1f1b", "compiled"), "float32")


@pytest.mark.parametrize("name", WAYS)
def test_experts_are_equal_to_one_process(pool, measured, name):
    model, layout, techniques = WAYS[name]
    options = {"techniques": techniques, "microbatch_rows": 2 if "microbatch" in name else 0, "pool": pool}
    report = verify(model, layout, BATCHES, steps=2, dtypes=(DTYPE_OF.get(name, "float64"),), **options)
    assert report, str(report)


@pytest.mark.parametrize("layout", [EP2, TENSOR], ids=str)
def test_bf16_costs_no_more_than_the_dtype_does(pool, layout):
    report = verify(SIGMOID, layout, BATCHES, dtypes=("bfloat16",), steps=2, pool=pool)
    assert report, str(report)


@pytest.mark.parametrize("layout", [HALVES, TENSOR], ids=str)
def test_bf16_costs_a_family_no_more_either(pool, layout):
    """In its third step rounding sends some tokens to other experts."""
    batches = RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())
    report = verify(families.config_of("mixtral"), layout, batches, dtypes=("bfloat16",), steps=3, pool=pool)
    assert report, str(report)


SPARSE = ["gpt_oss", "mixtral", "qwen3_moe", *families.SPARSE]


@pytest.mark.parametrize("name", SPARSE)
def test_a_family_is_equal_to_one_process(pool, name):
    batches = RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())
    report = verify(families.config_of(name), HALVES, batches, steps=2, pool=pool)
    assert report, str(report)


@pytest.mark.parametrize("layout", [TENSOR, STAGED], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "deepseek_v3", "qwen2_moe"])
def test_a_family_is_equal_beside_other_axes(pool, name, layout):
    batches = RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())
    report = verify(families.config_of(name), layout, batches, steps=2, pool=pool)
    assert report, str(report)


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
BALANCED_WAYS: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    **{name: (name, HALVES, {}) for name in ("gpt_oss", "granitemoe", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")},
    "replicated, recomputed": ("mixtral", Layout(dp_replicate=2, dp_shard=1), {"activation_checkpointing": "full"}),
    "by microbatch": ("mixtral", HYBRID, {"activation_checkpointing": "full"}),
    "by microbatch, tensor": ("mixtral", TENSOR, {"loss_chunks": 2}),
    "whole sequences": ("mixtral", Layout(dp_shard=1, tp=2), {"sequence_parallel": False}),
    "compiled": ("mixtral", EP2, {"compile": True, "compile_backend": "aot_eager"}),
    "tensor without ep": ("mixtral", Layout(dp_shard=1, tp=2), {"activation_checkpointing": "full"}),
}


@pytest.mark.parametrize("name", BALANCED_WAYS)
def test_the_loss_of_a_familys_own_routers_is_that_of_one_process(pool, name):
    family, layout, techniques = BALANCED_WAYS[name]
    batches = RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())
    rows = 2 if "microbatch" in name else 0
    config = families.config_of(family, **BALANCED)
    dtypes = ("float64",) if name in families.SPARSE else ("float64", "float32")
    report = verify(
        config, layout, batches, techniques=techniques, steps=2, dtypes=dtypes, microbatch_rows=rows, pool=pool
    )
    assert report, str(report)


def padded_batch(step: int) -> dict[str, Tensor]:
    batch = RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())(step)
    mask = torch.arange(9) < torch.randint(4, 10, (8, 1), generator=torch.Generator().manual_seed(step))
    labels = batch["tokens"].roll(-1, 1).masked_fill(~mask.roll(-1, 1), -100)
    labels[:, -1] = -100
    return {"tokens": batch["tokens"], "labels": labels, "attention_mask": mask.long()}


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=2), TENSOR], ids=str)
@ranks(lambda layout: layout.world)
def test_the_loss_of_a_familys_own_routers_is_transformers_own_and_counts_no_padding(layout):
    """Which transformers computes in float32."""
    config = families.config_of("mixtral", **BALANCED)
    config._experts_implementation = "eager"  # grouped kernels know no fp64
    theirs, ours = families.on_cpu(config).double(), families.on_cpu(config).double()
    batch = padded_batch(0)
    mask = batch["attention_mask"]
    theirs(
        input_ids=batch["tokens"], attention_mask=mask, labels=batch["tokens"].masked_fill(mask == 0, -100)
    ).loss.backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    laid = parallelize(ours, layout, seed=3)
    laid.evaluate(own_rows(laid, batch))
    laid.module(input_ids=own_rows(laid, batch)["tokens"][:1], use_cache=False)  # somebody looks, with gradients
    laid.forward_backward(own_rows(laid, batch))
    found = whole_on_first({name: p.grad for name, p in laid.named_parameters() if p.grad is not None})
    error = max(relative_errors(found, wanted).values()) if found else 0.0
    assert error <= 1e-6


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)], ids=str)
@ranks(lambda layout: layout.world)
def test_what_travels_for_a_familys_own_routers_is_what_the_plan_said(layout):
    laid = parallelize(families.on_cpu(families.config_of("mixtral", **BALANCED)), layout, seed=3)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    for step in range(2):
        with WireCounter() as wire:
            laid.forward_backward(own_rows(laid, RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())(step)))
            laid.optimizer_step(optimizer, 1.0)
    planned, sent = estimated(laid.plan, Batch(8, 9)), counted(wire)
    assert_estimated(planned, sent)


def with_its_own_kernel(name: str) -> tuple[str, float]:
    """A family's experts as training runs them, in float32: the kernel that its config chose, and the largest error
    of two steps' losses, gradients and weights against one process.
    """
    torch.manual_seed(0)
    plain, laid = families.on_cpu(families.config_of(name)), families.on_cpu(families.config_of(name))
    laid.load_state_dict(plain.state_dict())
    parallel = parallelize(laid, Layout(dp_shard=2, ep=2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, parallel)]
    errors = []
    for step in range(2):
        batch = RandomBatches(families.VOCABULARY, rows=4, seq_len=9, keys=())(step)
        losses = torch.nn.functional.cross_entropy(
            plain(batch["tokens"]).logits.flatten(0, 1), labels_of(batch).flatten(), reduction="sum"
        )
        loss = losses / (labels_of(batch) != -100).sum()
        loss.backward()
        errors.append(abs(float(parallel.forward_backward(own_rows(parallel, batch))) / float(loss) - 1))
        found = whole_on_first({name: p.grad for name, p in parallel.named_parameters() if p.grad is not None})
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        errors += relative_errors(found, wanted).values() if found else []
        optimizers[0].step()
        optimizers[0].zero_grad()
        parallel.optimizer_step(optimizers[1])
    return laid.config._experts_implementation, max(errors)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_familys_experts_train_with_the_kernel_that_they_come_with_and_verify_runs_that_one(spmd, pool, name):
    for kernel, error in spmd(2, with_its_own_kernel, name):
        assert kernel == "grouped_mm" and error < 1e-4
    config = families.config_of(name)
    assert CausalLM(config, "float32")().config._experts_implementation == "grouped_mm"
    batches = RandomBatches(families.VOCABULARY, rows=4, seq_len=9, keys=())
    report = verify(config, Layout(dp_shard=2, ep=2), batches, steps=1, dtypes=("float32",), pool=pool)
    assert report, str(report)


# --- tokens travel, whatever their experts

LOCAL = 2
"""Experts of each rank."""


def compute(rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("nd,ndo->no", rows, weights[numbers])


def travelled(drawn: list[list[list[int]]]) -> list[tuple[float, int, float]]:
    """For each routing of all ranks' tokens: the largest difference from computing it here, tokens that had to move,
    bytes that did.
    """
    world = get_world_info()[2]
    mesh = init_distributed(Layout(dp_shard=world, ep=world))
    axis = get_ep_mesh(mesh)  # type: ignore[arg-type]
    assert axis is not None
    group, rank, ranks = axis.get_group(), axis.get_local_rank(), axis.size()
    stack = Stack("experts", LOCAL * ranks, ("weight",), (), top_k=2, width=3)
    g = torch.Generator().manual_seed(0)
    everything = torch.randn(stack.experts, 3, 3, dtype=torch.float64, generator=g)
    found = []
    for chosen in drawn:
        all_rows = torch.randn(len(chosen), 3, dtype=torch.float64, generator=g)
        share = -(-len(chosen) // ranks)
        own = slice(rank * share, (rank + 1) * share)
        index = torch.tensor(chosen, dtype=torch.int64).view(-1, 2)
        rows = all_rows[own].clone().requires_grad_()
        weights = everything[rank * LOCAL : (rank + 1) * LOCAL].clone().requires_grad_()
        with WireCounter() as wire:
            out = expert_parallel._everywhere(lambda x, n, w=weights: compute(x, n, w), stack, group, rows, index[own])
            out.square().sum().backward()
        whole_rows, whole_weights = all_rows.clone().requires_grad_(), everything.clone().requires_grad_()
        is_somewhere = index < stack.experts
        wanted = torch.stack(
            [compute(whole_rows, index[:, k].clamp(max=stack.experts - 1), whole_weights) for k in range(2)], 1
        )
        wanted = wanted * is_somewhere.unsqueeze(-1)
        wanted.square().sum().backward()
        assert (
            rows.grad is not None
            and weights.grad is not None
            and whole_rows.grad is not None
            and whole_weights.grad is not None
        )
        pairs = [
            (out, wanted[own]),
            (rows.grad, whole_rows.grad[own]),
            (weights.grad, whole_weights.grad[rank * LOCAL : (rank + 1) * LOCAL]),
        ]
        error = max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in pairs)
        home = torch.arange(len(chosen)).unsqueeze(1) // share
        away = int((is_somewhere & (index // LOCAL != home)).sum())
        sent = [s for s in wire.sent if s.op == "all_to_all"]
        found.append((error, away, sum(s.bytes for s in sent[1:])))
    return found


def routings(ranks: int) -> st.SearchStrategy[list[list[int]]]:
    """Two experts of each token: any, few, one, or none."""
    experts = LOCAL * ranks
    numbers = st.one_of(
        st.integers(0, experts),
        st.integers(0, 1),
        st.just(0),
        st.just(experts - 1),
        st.just(experts),
        st.integers(experts - 1, experts),
    )
    one = st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1, max_size=14)
    same = numbers.flatmap(lambda n: st.integers(1, 14).map(lambda tokens: [[n, n]] * tokens))
    return st.one_of(one, same)


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_ends_and_makes_no_difference(spmd, ranks):
    """500 routings in all: skewed, empty, all to one. Nothing travels but the rows that must."""

    @settings(max_examples=10, phases=(Phase.explicit, Phase.generate))  # to shrink would take minutes
    @given(st.lists(routings(ranks), min_size=25, max_size=25))
    def check(drawn: list[list[list[int]]]) -> None:
        seen = spmd(ranks, travelled, drawn)
        for number in range(len(drawn)):
            assert max(one[number][0] for one in seen) <= 1e-12
            moved = sum(one[number][2] for one in seen)
            assert moved == 4 * seen[0][number][1] * 3 * 8, (
                "there and back, in forward and backward; three numbers of eight bytes"
            )

    check()


# --- what travels in a model


def batch_of(rows: int, seq: int, step: int = 0) -> dict[str, Tensor]:
    return RandomBatches(VOCABULARY, rows, seq)(step)


def one_step(model: DecoderConfig, layout: Layout, techniques: dict[str, Any]) -> tuple[Figures, Figures, int]:
    """What the plan foresees for this rank and what it sent, by operation and ranks.

    And how many rows its tokens sent elsewhere.
    """
    laid = parallelize(model, layout, techniques=techniques, seed=3)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    away = 0
    everywhere = expert_parallel._everywhere

    def counting(compute: Any, stack: Stack, group: Any, rows: Tensor, index: Tensor, *others: Any) -> Tensor:
        nonlocal away
        own = stack.experts // group.size()
        away += int(((index < stack.experts) & (index // own != group.rank())).sum())
        return everywhere(compute, stack, group, rows, index, *others)

    for step in range(2):
        away = 0
        with patch.object(expert_parallel, "_everywhere", counting), WireCounter() as wire:
            laid.forward_backward(own_rows(laid, batch_of(8, 9, step)))
            laid.optimizer_step(optimizer, 1.0)
    return estimated(laid.plan, Batch(8, 9)), counted(wire), away


EVEN = replace(SIGMOID, vocab_size=64)
"""The plan counts what the first tensor-parallel rank sends: here all have as many token ids."""
WIRE = {
    "halves, balanced": (SIGMOID, HALVES, {}),
    "recomputed": (SIGMOID, EP4, {"activation_checkpointing": "full"}),
    "experts frozen": (SOFTMAX, HALVES, {"freeze": ("experts",)}),
    "tensor, recomputed": (EVEN, TENSOR, {"activation_checkpointing": "full"}),
    "balanced by batch": (BATCHED, HYBRID, FULL),
    "uneven": (UNEVEN, SHARDED, {}),
    "balanced by batch, tensor": (replace(BATCHED, vocab_size=64), TENSOR, {}),
}


@pytest.mark.parametrize("name", WIRE)
def test_what_travels_is_what_the_plan_said(spmd, name):
    model, layout, techniques = WIRE[name]
    assert model.moe is not None
    said = spmd(layout.world, one_step, model, layout, techniques)
    for planned, sent, _ in said:
        assert {key: calls for key, (calls, _) in sent.items()} == {key: calls for key, (calls, _) in planned.items()}
        for key, (_, moved) in sent.items():
            assert key[0] == "all_to_all" or moved == pytest.approx(planned[key][1], rel=1e-12), key
    again = techniques.get("activation_checkpointing") == "full"
    layers = model.n_layers - model.moe.first_dense
    exchanged = sum(sent.get(("all_to_all", layout.ep), (0, 0))[1] for _, sent, _ in said)
    counts = layout.world * layers * (1 + again) * 8 * model.moe.n_experts * (layout.ep - 1) / layout.ep
    rows = sum(away for *_, away in said) // (1 + again)  # of two forwards
    assert exchanged - counts == rows * (4 + 2 * again) * model.dim * 4


class Squashed(nn.Module):
    """A layer's experts and a function that keeps their output: its backward recomputes before it comes to them."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def squashed() -> Decoder:
    model = Decoder(SOFTMAX)
    for layer in model.layers.values():
        layer.feed_forward = Squashed(layer.feed_forward)
    return model


@pytest.mark.parametrize("recomputed", ["none", "full"])
@ranks(4)
def test_what_an_accelerator_gathers_ahead_is_needed(recomputed):
    """A recomputed forward calls the hooks of the stacks inside a block, and must gather no block that is done."""
    techniques = {"activation_checkpointing": recomputed}
    steps = []
    for prefetches in (False, True):
        with patch.object(fully_sharded, "is_accelerator", lambda device, prefetches=prefetches: prefetches):
            laid = parallelize(squashed, HALVES, techniques=techniques, seed=3)
        with WireCounter() as wire:
            loss = laid.forward_backward(own_rows(laid, batch_of(8, 9, 0)))
        steps.append((float(loss), [parameter.grad.to_local() for parameter in laid.parameters()]))
    (loss, plain), (other, ahead) = steps
    same = loss == other and all(torch.equal(one, two) for one, two in zip(plain, ahead, strict=True))
    planned, sent = estimated(laid.plan, Batch(8, 9)), counted(wire)
    assert same
    for key in sent:
        if key[0] == "all_gather":
            assert sent[key] == pytest.approx(planned[key], rel=1e-12), key


FROZEN = {
    "the start": ("embedding", r"layers\.[01]"),
    "all in front of the last experts": (r"^(?!layers\.3\.feed_forward|norm|head)",),
    "all but experts": (r"^(?!.*experts)",),
    "all but routers": (r"^(?!.*router)",),
    "all but the head": (r"^(?!head)",),
}


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", FROZEN)
def test_no_gradient_travels_where_nothing_in_front_is_trained(spmd, name, mode):
    for planned, sent, _ in spmd(2, one_step, SOFTMAX, EP2, {"freeze": FROZEN[name], "activation_checkpointing": mode}):
        assert {key: calls for key, (calls, _) in sent.items()} == {key: calls for key, (calls, _) in planned.items()}


@ranks(2)
def test_a_shared_expert_computes_while_rows_travel():
    there = ["begin", "shared", "end"]
    back = ["begin", "end"]
    gradients_back = ["begin", "shared backward", "end"]
    laid = parallelize(replace(SIGMOID, n_layers=2), EP2, seed=3)
    said: list[str] = []
    begin, end = expert_parallel._Journey.begin, expert_parallel._Journey.end

    def began(*args: Any) -> Tensor:
        said.append("begin")
        return begin(*args)

    def ended(*args: Any) -> Tensor:
        said.append("end")
        return end(*args)

    shared = laid.parts[0].get_submodule("layers.1.feed_forward.shared")
    shared.register_forward_hook(lambda *_: said.append("shared"))
    shared.register_full_backward_hook(lambda *_: said.append("shared backward"))
    with patch.multiple(expert_parallel._Journey, begin=began, end=ended):
        laid.forward_backward(own_rows(laid, batch_of(8, 9)))
    assert said == there + back + back + gradients_back


# --- the bias


def bias_after(layout: Layout, steps: int, fault: str = "") -> list[Tensor]:
    laid = parallelize(SIGMOID, layout, techniques={"precision": {"master": "float64"}}, seed=3, microbatch_rows=2)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    with FAULTS[fault]() if fault else nullcontext():
        for step in range(steps):
            laid.forward_backward(own_rows(laid, batch_of(8, 9, step)))
            laid.optimizer_step(optimizer, 1.0)
    return [buffer.clone() for name, buffer in laid.named_buffers() if name.endswith("router.bias")]


@pytest.mark.parametrize("layout", [EP2, HYBRID, ACROSS, STAGED], ids=str)
def test_the_bias_is_bitwise_that_of_one_process_after_20_steps(spmd, layout):
    wanted = spmd(1, bias_after, ONE, 20)[0]
    assert len(wanted) == 3 and all(bias.count_nonzero() > 2 for bias in wanted)
    ranks = spmd(layout.world, bias_after, layout, 20)
    found = [[*ranks[0], *ranks[2]]] if layout == STAGED else ranks  # a stage has the biases of its own blocks
    for biases in found:
        assert all(torch.equal(a, b) for a, b in zip(biases, wanted, strict=True))


# --- one public function

DOOR_LAYOUTS = {"sharded": HALVES, "hybrid": HYBRID, "tensor": TENSOR}


def by_the_doors(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a mean loss by the public functions, and by one process."""
    torch.manual_seed(0)
    model = Decoder(replace(SOFTMAX, moe=replace(SOFTMAX.moe, sequence_loss=0.0, z_loss=0.0))).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 3
            )
    tokens = torch.randint(0, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(5))
    model(tokens).logsumexp(-1).mean().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mesh = init_distributed(layout)
    assert mesh is not None
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh)
    apply_expert_parallel(model, mesh)
    assert isinstance(model.layers["0"].feed_forward.experts.w_up, DTensor)  # type: ignore[union-attr]
    from torch.distributed.fsdp import MixedPrecisionPolicy

    apply_fsdp2(model, mesh, MixedPrecisionPolicy())
    rank, ranks = data_position(mesh)
    share = 8 // ranks
    model(tokens[rank * share : (rank + 1) * share]).logsumexp(-1).mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return whole_on_first(found), wanted


@pytest.mark.parametrize("name", DOOR_LAYOUTS)
def test_the_public_functions_average_as_torch_does(spmd, name):
    found, wanted = spmd(4, by_the_doors, DOOR_LAYOUTS[name])[0]
    assert found.keys() == wanted.keys()
    errors = relative_errors(found, wanted)
    assert max(errors.values()) < 1e-10, max(errors, key=errors.__getitem__)


@ranks(2)
def test_what_functions_leave_to_the_users_loop_is_said():
    mesh = init_distributed(Layout(dp_shard=2))
    assert mesh is not None
    torch.manual_seed(0)
    with heard() as said:
        for model in (SIGMOID, DENSE):
            apply_fsdp2(Decoder(model), mesh)
    said = [text for text in said if "Router" in text]
    assert len(said) == 1 and said[0].startswith("model.moe.bias_rate, sequence_loss: these functions lay a model out")


@ranks(2)
def test_functions_in_another_order_are_refused():
    said = []
    mesh = init_distributed(EP2)
    assert mesh is not None
    torch.manual_seed(0)
    with pytest.raises(ConfigError) as error:
        apply_fsdp2(Decoder(SOFTMAX), mesh)
    said.append(str(error.value))
    torch.manual_seed(0)
    with pytest.raises(ConfigError) as error:
        apply_fsdp2(apply_expert_parallel(Decoder(SOFTMAX), mesh), mesh["dp_shard"])
    whole, sliced = said[0], str(error.value)
    assert "ep = 2, and the experts of layers." in whole and "feed_forward.experts are whole on every rank" in whole
    assert "Call apply_expert_parallel" in whole
    assert "the mesh that was given (dp_shard) does not know that axis" in sliced


@pytest.mark.first
@ranks(1)
def test_failed_steps_and_frozen_layers_move_no_bias():
    laid = parallelize(SIGMOID, ONE, seed=3, techniques={"freeze": (r"layers\.1\.",)}, microbatch_rows=4)
    optimizer = torch.optim.SGD([p for p in laid.parameters() if p.requires_grad], lr=0.1)
    broken = batch_of(8, 9)
    seen = []

    def fail(*_: object) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ZeroDivisionError

    handle = laid.parts[0].get_submodule("head").register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        laid.forward_backward(broken)
    handle.remove()
    optimizer.zero_grad()
    routers = [module for module in laid.parts[0].modules() if isinstance(module, Router)]
    assert all(router.counts is None for router in routers)
    laid.forward_backward(batch_of(8, 9, 1))
    laid.optimizer_step(optimizer, 1.0)
    frozen, *moved = [router.bias.clone() for router in routers if router.bias is not None]
    assert not frozen.any() and all(bias.any() for bias in moved)


# --- checkpoints


def trained(layout: Layout, folder: str) -> Held:
    model = parallelize(SIGMOID, layout, seed=3)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(8, 9, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer)
    return held(model, optimizer)


def trained_fewer(folder: str) -> None:
    save(parallelize(FEWER, EP2, seed=3), folder)


def read(layout: Layout, folder: str, onto: str) -> Held:
    model = parallelize(SIGMOID, layout, seed=4)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    load(model, folder, optimizer=optimizer)
    save(model, onto, optimizer=optimizer)
    model.audit(optimizer)
    return held(model, optimizer)


@ranks(4)
def test_owners_hold_equal_parts_of_uneven_experts():
    model = parallelize(UNEVEN, SHARDED)
    stacks = [p for name, p in model.named_parameters() if ".experts." in name and isinstance(p, DTensor)]
    assert {p.shape[0] for p in stacks} == {6}
    assert {p.to_local().numel() * 4 - p.numel() for p in stacks} == {0}


def test_a_checkpoint_is_read_by_every_other_layout_and_back_bit_by_bit(spmd, tmp_path):
    folder = str(tmp_path / "first")
    written = spmd(4, trained, EP4, folder)[0]
    assert len(written[0]) > 40 and any(name.endswith("router.bias") for name in written[0])
    others = (
        Layout(dp_shard=4),
        HALVES,
        HYBRID,
        Layout(dp_shard=2, tp=2),
        ACROSS,
        Layout(pp=2, dp_shard=2),
        STAGED,
        EP4,
    )
    for number, layout in enumerate(others):
        onto = str(tmp_path / str(number))
        found = spmd(4, read, layout, folder, onto)[0]
        assert_same(found, written, layout)
        folder = onto


def trained_and_lost(folder: str) -> None:
    """Writes every share of a stack where the first one belongs."""
    from meshwright.checkpoint import snapshot
    from meshwright.distributed.weights.shards import Piece

    true = snapshot.pieces

    def first(tensor: Tensor) -> list[Piece]:
        shares = isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())
        return [replace(piece, offset=(0,) * tensor.dim()) if shares else piece for piece in true(tensor)]

    with patch.object(snapshot, "pieces", first):
        trained(EP2, folder)


def test_a_checkpoint_that_would_lose_an_expert_is_not_written(spmd, tmp_path):
    with pytest.raises(WorkerFailed, match=r"experts\.w_"):
        spmd(2, trained_and_lost, str(tmp_path / "lost"))


FEWER = replace(SIGMOID, moe=replace(SIGMOID.moe, n_experts=4, n_groups=2))


def read_with_more_experts(folder: str) -> None:
    load(parallelize(SIGMOID, EP2, seed=4), folder)


def test_a_checkpoint_with_fewer_experts_is_not_read(spmd, tmp_path):
    folder = str(tmp_path / "fewer")
    spmd(2, trained_fewer, folder)
    with pytest.raises(WorkerFailed, match=r"router|experts"):
        spmd(2, read_with_more_experts, folder)


# --- faults


@contextmanager
def gradients_times_ranks() -> Iterator[None]:
    """Experts' gradients are as many times too large as ranks share them out."""
    share_out = expert_parallel.use_local_parameters

    def twice(module: torch.nn.Module, views: list[LocalView]) -> None:
        share_out(module, [replace(view, gradient_factor=2.0) for view in views])

    with patch.object(expert_parallel, "use_local_parameters", twice):
        yield


ended, whole_forward, drawn = routing.end_step, Router.forward, constructed.draw_rows
stepped = ParallelModel.forward_backward


def moved_by_own_tokens(routers: Any, groups: Any, *, skipped: Any) -> Any:
    """Every rank moves the bias by the tokens that it has seen itself."""
    return ended(routers, [], skipped=skipped)


def everything_is_routed(self: Router, x: Tensor, routed: Any = None) -> Any:
    """Experts compute padding, and the bias counts it."""
    return whole_forward(self, x)


NOWHERE = property(lambda self: None, lambda self, value: None)
"""The loss per sequence is that of a rank's part of the sequence."""


def first_experts_drawn(local: Tensor, offset: tuple, shape: tuple, *args: Any) -> None:
    """Each rank draws the first experts for its own."""
    drawn(local, (0, *offset[1:]) if len(shape) == 3 else offset, shape, *args)


def rows_of_the_first(self: ParallelModel, batch: Any) -> Any:
    """Ranks of the expert axis are given the first one's rows."""
    return stepped(self, agree.from_rank_zero(batch))


FAULTS = {
    "gradients_times_ranks": gradients_times_ranks,
    "bias_by_own_tokens": partial(patch.object, routing, "end_step", moved_by_own_tokens),
    "padding_is_routed": partial(patch.object, Router, "forward", everything_is_routed),
    "losses_of_parts": partial(patch.object, Router, "across", NOWHERE, create=True),
    "batches_of_one_rank": partial(patch.object, routing, "share_microbatches", lambda routers, groups: None),
    "choices_of_one_rank": partial(patch, "meshwright.distributed.experts.sum_over", lambda groups, counts: counts),
    "alike_experts": partial(patch.object, constructed, "draw_rows", first_experts_drawn),
    "equal_rows": partial(patch.object, ParallelModel, "forward_backward", rows_of_the_first),
}
WHERE = {
    "gradients_times_ranks": (
        SOFTMAX,
        EP2,
        "the gradient of the parameter layers.0.feed_forward.experts.w_gate, after the backward",
    ),
    "bias_by_own_tokens": (SIGMOID, EP2, "the output of layers.1.feed_forward (forward) of step 2"),
    "padding_is_routed": (SIGMOID, EP2, "the output of layers.1.feed_forward (forward)"),
    "losses_of_parts": (SIGMOID, TENSOR, "the gradient of layers.3.feed_forward_norm's output (backward)"),
    "batches_of_one_rank": (BATCHED, EP2, "the gradient of layers.3.feed_forward_norm's output (backward)"),
    "choices_of_one_rank": (
        partial(families.config_of, "mixtral", **BALANCED),
        HALVES,
        "the gradient of model.layers.1.post_attention_layernorm's output (backward)",
    ),
    "alike_experts": (SOFTMAX, EP2, "the initial weight layers.0.feed_forward.experts.w_gate"),
    "equal_rows": (SOFTMAX, EP2, "the output of embedding (forward), on rank 1"),
}


def broken_by(problem: Any, layout: Layout, parallelize_fn: Any, fault: str) -> Any:
    from meshwright.verification.outcome import candidate

    with FAULTS[fault]():
        return candidate(problem, layout, parallelize_fn)


@pytest.mark.kills("experts", "fault")
@pytest.mark.parametrize("fault", WHERE)
def test_a_fault_is_found_where_it_is(pool, monkeypatch, fault):
    from meshwright.verification import verify as verifying

    model, layout, where = WHERE[fault]
    model = model() if isinstance(model, partial) else model
    monkeypatch.setattr(verifying, "candidate", partial(broken_by, fault=fault))
    batches = (
        BATCHES if isinstance(model, DecoderConfig) else RandomBatches(families.VOCABULARY, rows=8, seq_len=9, keys=())
    )
    report = verifying.verify(model, layout, batches, steps=2, dtypes=("float64",), pool=pool)
    (comparison,) = report.comparisons
    assert comparison.first is not None and comparison.first.place == where
    assert comparison.first.error > 1e4 * max(comparison.first.bound, 1e-16), "found by a hair"
