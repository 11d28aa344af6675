"""float8 in real processes: equal to one process with plain torchao, and never lost without a word."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import own_rows
from support.ranks import ranks, refusal
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright import ConfigError, IntegrityError
from meshwright.checkpoint import load, save
from meshwright.distributed import (
    apply_ac,
    apply_float8,
    apply_fsdp2,
    apply_tensor_parallel,
    build_parallel_model,
    float8,
    order,
    products,
)
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.tensor import layers
from meshwright.distributed.transforms import apply_model_transforms
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.module_kinds import config_at
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.layout import Layout
from meshwright.verification import verify as verifying
from meshwright.verification.outcome import candidate
from meshwright.verification.problem import RandomBatches

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="float8 is torchao's: pip install 'meshwright[float8]'"
)

DENSE = DecoderConfig(61, 32, 2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=20, qk_norm=True)
WIDE = replace(DENSE, dim=64, hidden_dim=96)
SPARSE = replace(DENSE, moe=MoEConfig(n_experts=4, hidden_dim=16, n_shared=1))
BATCHES = RandomBatches(61, rows=8, seq_len=9)
SHARDED, STAGED = Layout(dp_shard=2), Layout(pp=2, dp_shard=1)
FROZEN = {"freeze": ["layers.0", "embedding"], "float8_filter": ["w_down"]}

WAYS: dict[str, tuple[DecoderConfig, Layout, dict[str, Any], str]] = {
    "sharded, microbatches": (DENSE, SHARDED, {"float8": "tensorwise"}, "bfloat16"),
    "hybrid, microbatches": (
        DENSE,
        Layout(dp_replicate=2, dp_shard=2),
        {"float8": "rowwise", "sync_grad_accum": "shard"},
        "bfloat16",
    ),
    "replicated": (
        DENSE,
        Layout(dp_replicate=2, dp_shard=1),
        {"float8": "rowwise", "activation_checkpointing": "full"},
        "float32",
    ),
    "high gradients": (
        DENSE,
        SHARDED,
        {"float8": "rowwise_with_gw_hp", "activation_checkpointing": "selective"},
        "float32",
    ),
    "compiled": (DENSE, SHARDED, {"float8": "tensorwise", "compile": True, "compile_backend": "aot_eager"}, "float32"),
    "scaled": (DENSE, SHARDED, {"float8": "rowwise"}, "float16"),
    "frozen, filtered": (replace(DENSE, tied_embeddings=True), SHARDED, {"float8": "rowwise", **FROZEN}, "float32"),
    "pipeline, microbatches": (
        replace(DENSE, n_layers=4),
        Layout(pp=2, dp_shard=2),
        {"float8": "tensorwise"},
        "bfloat16",
    ),
    "experts": (SPARSE, Layout(dp_shard=2, ep=2), {"float8": "rowwise"}, "float32"),
    "tensor": (
        WIDE,
        Layout(dp_shard=2, tp=2),
        {"float8": "tensorwise", "activation_checkpointing": "full"},
        "bfloat16",
    ),
    "tensor, whole sequences": (
        WIDE,
        Layout(dp_shard=1, tp=2),
        {"float8": "tensorwise", "sequence_parallel": False},
        "float32",
    ),
    "split backward": (
        replace(DENSE, n_layers=4),
        STAGED,
        {"float8": "tensorwise", "pipeline_schedule": "zbv_zero_bubble"},
        "bfloat16",
    ),
}


def verified(
    pool: Any, model: Any, layout: Layout, techniques: dict[str, Any], dtype: str = "float32", rows: int = 0
) -> Any:
    return verifying.verify(
        model, layout, BATCHES, techniques=techniques, steps=2, dtypes=(dtype,), microbatch_rows=rows, pool=pool
    )


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_float8_costs_no_more_than_it_does_in_one_process(pool, name):
    model, layout, techniques, dtype = WAYS[name]
    report = verified(pool, model, layout, techniques, dtype, 1 if "microbatches" in name else 0)
    assert report, str(report)
    (found,) = report.comparisons
    assert found.dtype == "float8"
    counted = {d.name for d in found.of("products")}
    every = {"outputs", "gradients of inputs", "gradients of weights"}
    assert counted == (
        set() if name == "compiled" else every - {"gradients of weights"} if name == "high gradients" else every
    )


TENSOR = Layout(dp_shard=1, tp=2)
EXACT_WAYS = {
    "tensor": (WIDE, TENSOR, {"float8": "rowwise"}, 0),
    "tensor, high gradients": (WIDE, TENSOR, {"float8": "rowwise_with_gw_hp"}, 0),
    "tensor, compiled": (WIDE, TENSOR, {"float8": "rowwise", "compile": True, "compile_backend": "aot_eager"}, 0),
    "tensor, split backward": (
        replace(WIDE, n_layers=4),
        Layout(pp=2, dp_shard=1, tp=2),
        {"float8": "rowwise", "pipeline_schedule": "zbv_zero_bubble"},
        2,
    ),
    "sharded": (DENSE, SHARDED, {"float8": "rowwise"}, 1),
}


@pytest.mark.all
@pytest.mark.parametrize("name", EXACT_WAYS)
def test_scales_that_are_powers_of_two_round_alike_however_operands_are_cut(pool, name):
    """So what differs are sums in another order, and a few roundings that those tip over: far less than rounding to
    float8 does.
    """
    model, layout, techniques, rows = EXACT_WAYS[name]
    report = verified(pool, model, layout, techniques, rows=rows)
    assert report, str(report)
    assert max(d.error for d in report.comparisons[0].of("gradient")) < 5e-3


@pytest.mark.all
def test_a_model_of_transformers(pool):
    from transformers import Qwen2Config

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 20}
    config = Qwen2Config(vocab_size=61, hidden_size=32, intermediate_size=48, tie_word_embeddings=True, **sizes)
    batches = replace(BATCHES, keys=())
    report = verifying.verify(
        config, SHARDED, batches, techniques={"float8": "rowwise"}, steps=1, dtypes=("float32",), pool=pool
    )
    assert report, str(report)


# --- what would be lost silently


class HighPrecision(torch.autograd.Function):
    """What torchao's product gives, of operands that were never rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,), (x, weight) = grad_outputs, ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2), None, None


def lose_one(problem: Any, layout: Layout, parallelize_fn: Any) -> Any:
    """The feed-forwards' last layers are converted to look at, and multiply in float32."""
    whole = float8.apply

    def losing(model: nn.Module, plan: Any) -> nn.Module:
        model = whole(model, plan)
        for path, module in model.named_modules():
            if path.endswith("w_down"):
                module.forward = lambda x, own=module: HighPrecision.apply(x, own.weight.T)
        return model

    with patch.object(float8, "apply", losing):
        return candidate(problem, layout, parallelize_fn)


@pytest.mark.kills("float8", mutant="products in high precision")
def test_products_that_are_computed_in_high_precision_are_found(pool, monkeypatch):
    monkeypatch.setattr(verifying, "candidate", lose_one)
    report = verified(pool, DENSE, SHARDED, {"float8": "tensorwise"})
    (found,) = report.comparisons
    beyond = [d for d in found.differences if d.is_beyond]
    assert not report and {d.stage for d in beyond} == {"products"} and len(beyond) == 3
    assert "the products in float8 that give outputs: fewer than in one process, so some are in high precision" in str(
        report
    )


def multiply_plainly(problem: Any, layout: Layout, parallelize_fn: Any) -> Any:
    """Tensor parallelism computes products itself, and asks no layer how."""
    with patch.object(layers, "products_of", lambda *args, **kwargs: products.PLAIN):
        return candidate(problem, layout, parallelize_fn)


@pytest.mark.kills("float8", mutant="tensor parallelism drops it")
def test_tensor_parallelism_that_drops_float8_is_found(pool, monkeypatch):
    monkeypatch.setattr(verifying, "candidate", multiply_plainly)
    report = verified(pool, WIDE, TENSOR, {"float8": "rowwise"})
    assert not report and {d.stage for d in report.comparisons[0].differences if d.is_beyond} == {"products"}


@pytest.mark.first("rowwise_with_gw_hp")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_alone_are_those_of_torchao(recipe):
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(2, 9, size, generator=generator, dtype=torch.bfloat16) for size in (32, 48))
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 48)) for _ in range(2)).bfloat16()
    linear = apply_float8(model, False, recipe=recipe).blocks[0][0]
    made, weight, bias = products.products_of(linear), linear.weight.detach(), linear.bias.detach()
    output = linear(x.requires_grad_())
    output.backward(gradient)
    assert torch.equal(made.output(x.detach(), weight, bias), output) and torch.equal(
        made.linear(x, weight, bias), output
    )
    assert torch.equal(made.of_input(gradient, weight), x.grad) and torch.equal(
        made.of_weight(gradient, x.detach()), linear.weight.grad
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("fewer", "layers.0.attention.wq computes in float32, and the plan says float8"),
        ("more", "embed_out computes in float8, and the plan says float32"),
        ("recipe", "layers.0.attention.wq computes in float8 otherwise than by the recipe rowwise"),
    ],
)
@ranks(2)
def test_the_audit_sees_which_layers_are_converted(wrong, says):
    whole = float8.apply

    def mistaken(model: nn.Module, plan: Any) -> nn.Module:
        recipe = "tensorwise" if wrong == "recipe" else plan.float8.recipe
        chosen = (
            plan.float8.modules[1:]
            if wrong == "fewer"
            else (*plan.float8.modules, *(["embed_out"] if wrong == "more" else []))
        )
        return whole(model, replace(plan, float8=replace(plan.float8, modules=chosen, recipe=recipe)))

    def built() -> nn.Module:
        model = as_module(DENSE)
        model.embed_out = nn.Linear(16, 16)
        return model

    with patch.object(float8, "apply", mistaken), pytest.raises(IntegrityError) as caught:
        parallelize(built(), SHARDED, techniques={"float8": "rowwise"})
    assert says in str(caught.value)


@ranks(2)
def test_a_laid_out_model_says_what_multiplies_in_float8():
    attention = ", ".join(f"layers.*.attention.{name} (2)" for name in ("wq", "wk", "wv", "wo"))
    text = str(parallelize(DENSE, SHARDED, techniques={"float8": "rowwise", "float8_filter": ["feed_forward"]}))
    assert f"products in emulated float8: {attention}\n" in f"{text}\n"


# --- weights


def kept(folder: str) -> dict[str, Tensor]:
    laid = parallelize(DENSE, SHARDED, techniques={"float8": "tensorwise"}, seed=3)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    laid.forward_backward(own_rows(laid, BATCHES(0)))
    laid.optimizer_step(optimizer, 1.0)
    save(laid, folder, optimizer=optimizer)
    return whole_on_first(dict(laid.named_parameters()))


def read(folder: str, techniques: dict[str, Any]) -> dict[str, Tensor]:
    laid = parallelize(DENSE, STAGED, techniques=techniques, seed=4)
    load(laid, folder, optimizer=torch.optim.AdamW(laid.parameters(), lr=0.01))
    return whole_on_first(dict(laid.named_parameters()), differ=True)


@pytest.mark.all
def test_a_checkpoint_does_not_know_of_float8(spmd, tmp_path):
    folder = str(tmp_path / "checkpoint")
    written = spmd(2, kept, folder)[0]
    for techniques in ({}, {"float8": "rowwise"}):
        found = spmd(2, read, folder, techniques)[0]
        assert found.keys() == written.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in written.items()
        )


def initial(techniques: dict[str, Any]) -> dict[str, Tensor]:
    return whole_on_first(dict(parallelize(DENSE, SHARDED, techniques=techniques, seed=3).named_parameters()))


@pytest.mark.all
def test_initial_weights_are_those_without_float8(spmd):
    with_it, without = (spmd(2, initial, techniques)[0] for techniques in ({"float8": "rowwise"}, {}))
    assert with_it.keys() == without.keys() and all(
        torch.equal(with_it[name], tensor) for name, tensor in without.items()
    )


# --- the doors


@pytest.mark.all
@ranks(2)
def test_every_door_gives_the_same():
    mesh = init_distributed(SHARDED)
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    made = {
        "built": build_parallel_model(DENSE, "cpu", mesh, mp_policy=policy, fp8=True, ac_mode="full"),
        "high": build_parallel_model(DENSE, "cpu", mesh, mp_policy=policy, ac_mode="full"),
    }
    by_hand = apply_fsdp2(apply_ac(apply_float8(as_module(DENSE)), "full"), mesh, policy)
    order.materialise(by_hand, torch.device("cpu"), 0, {})
    chain = {"fully_shard": {}, "float8": {}}
    chained = apply_model_transforms(as_module(DENSE), chain, device_mesh=mesh)
    made |= {"by hand": by_hand, "chained": chained}
    tokens = torch.arange(32).view(2, 16)
    found = {
        name: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item() for name, model in made.items()
    }
    assert found["built"] == found["by hand"] == found["chained"] != found["high"]


def test_hooks_and_what_was_noted_on_a_layer_stay(caplog):
    model = as_module(DENSE).eval()
    layer, seen = model.layers["0"].feed_forward.w_up, []
    layer.register_forward_hook(lambda module, args, output: seen.append(module))
    layer.noted, weight = "yes", layer.weight
    apply_float8(model, recipe="rowwise", filter=("w_down",))
    made = model.layers["0"].feed_forward.w_up
    model(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    assert seen == [made] and made is not layer and made.weight is weight and made.noted == "yes" and not made.training
    assert type(model.layers["0"].feed_forward.w_down) is nn.Linear
    assert "FSDP will gather weights in high precision" in caplog.text


def test_one_layer_at_two_places_stays_one():
    model = as_module(DENSE)
    for block in model.layers.values():
        block.feed_forward.w_gate = block.feed_forward.w_up
    apply_float8(model, False)
    assert all(block.feed_forward.w_gate is block.feed_forward.w_up for block in model.layers.values())
    assert all(config_at(block.feed_forward.w_up) is not None for block in model.layers.values())


@pytest.mark.all
@ranks(2)
def test_tensor_parallelism_after_it_keeps_it():
    mesh = init_distributed(TENSOR)
    cut = apply_tensor_parallel(apply_float8(as_module(WIDE), recipe="rowwise"), mesh)
    order.materialise(cut, torch.device("cpu"), 0, {})
    whole = apply_float8(as_module(WIDE), recipe="rowwise")
    order.materialise(whole, torch.device("cpu"), 0, {})
    tokens = torch.arange(32).view(2, 16)
    cut, whole = tuple(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item() for model in (cut, whole))
    assert cut == pytest.approx(whole, rel=1e-6)


@pytest.mark.all
@ranks(2)
def test_after_tensor_parallelism_it_is_refused():
    model = apply_tensor_parallel(as_module(DENSE), init_distributed(Layout(dp_shard=1, tp=2)))
    said = refusal(lambda: apply_float8(model), ConfigError)
    assert "float8 must come before tensor_parallel" in said


def test_what_cannot_be_done_is_refused():
    model = as_module(DENSE)
    model.layers["0"].attention.wq.forward = lambda x: x
    with pytest.raises(ConfigError, match=r"layers.0.attention.wq has a forward that was put there from outside"):
        apply_float8(model)
    with pytest.raises(ConfigError, match="float8 is on this Decoder already; apply it once"):
        apply_float8(apply_float8(as_module(DENSE)))
