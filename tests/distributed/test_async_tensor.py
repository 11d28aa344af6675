"""Asynchronous tensor parallelism: what our code makes of torch's fused operators, here of the forms that torch has
for every device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families
from support.ranks import ranks, refusal

from meshwright import ConfigError, Layout, UnsupportedError, parallelize
from meshwright import plan as make_plan
from meshwright.distributed.tensor import functions
from meshwright.introspection.cluster import Cluster
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.values import Batch

pytestmark = pytest.mark.all

TP2, TP4 = Layout(dp_shard=1, tp=2), Layout(dp_shard=1, tp=4)
UNTIED = DecoderConfig(257, 16, 3, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=16, qk_norm=True)
TIED = replace(UNTIED, tied_embeddings=True)
CALLS: Counter[str] = Counter()


def counted(group: Any) -> functions.Operators:
    """torch's own definition of the operators, in plain collectives."""
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_matmul_fallback,
        _fused_matmul_reduce_scatter_fallback,
    )

    def gather_products(*args: Any, **options: Any):
        CALLS["gather"] += 1
        return _fused_all_gather_matmul_fallback(*args, **options)

    def product_scatter(*args: Any):
        CALLS["scatter"] += 1
        return _fused_matmul_reduce_scatter_fallback(*args)

    return functions.Operators(gather_products, product_scatter)


def summands_left_alone(group: Any) -> functions.Operators:
    """A broken one: ranks keep their own summands."""
    whole = counted(group)
    return replace(whole, product_scatter=lambda x, matrix, *_: (x @ matrix).chunk(group.size(), dim=1)[group.rank()])


def parts_in_another_order(group: Any) -> functions.Operators:
    """A broken one: what others hold comes in another order."""
    whole = counted(group)

    def gather_products(part: Any, *args: Any, **options: Any):
        gathered, products = whole.gather_products(part, *args, **options)
        return gathered.roll(part.shape[1], dims=1), [product.roll(part.shape[1], dims=1) for product in products]

    return replace(whole, gather_products=gather_products)


MODELS = {
    "decoder": lambda: UNTIED,
    "tied": lambda: TIED,
    "gpt2": lambda: families.on_cpu(families.config_of("gpt2")),
    "phi": lambda: families.on_cpu(families.config_of("phi")),
}


def gradients(
    kind: str, layout: Layout, asynchronous: bool, seq: int, techniques: dict[str, Any]
) -> dict[str, torch.Tensor]:
    requested = {"precision": {"master": "float64"}, **techniques}
    made = make_plan(MODELS[kind](), layout, cluster=Cluster(layout.tp), techniques=requested)
    assert made.tensor is not None
    made = replace(made, tensor=replace(made.tensor, async_tensor_parallel=asynchronous))
    model = parallelize(MODELS[kind](), layout, plan=made, seed=3)
    tokens = torch.randint(0, families.VOCABULARY, (3, seq + 1), generator=torch.Generator().manual_seed(1))
    loss = model.forward_backward({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}).loss
    found = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    return {"loss": loss} | found


def compared(
    kind: str, layout: Layout, seq: int, techniques: dict[str, Any], operators: Any = counted
) -> tuple[float, dict[str, int]]:
    """The largest relative error against the plain form, and how often each operator was called."""
    CALLS.clear()
    with patch.object(functions, "symmetric_memory", operators):
        found = gradients(kind, layout, True, seq, techniques)
    calls = dict(CALLS)
    expected = gradients(kind, layout, False, seq, techniques)
    assert found.keys() == expected.keys()
    scale = torch.stack([g.norm() for g in expected.values()]).norm()
    errors = [(found[name] - g).norm() / g.norm().clamp(min=1e-6 * scale) for name, g in expected.items()]
    return float(torch.stack(errors).amax()), calls


@pytest.mark.parametrize(
    ("kind", "layout", "techniques"),
    [
        ("decoder", TP2, {}),
        ("tied", TP4, {"regather": False}),
        ("decoder", TP2, {"activation_checkpointing": "full"}),
        ("gpt2", TP2, {}),
        ("phi", TP2, {}),
    ],
    ids=str,
)
def test_fused_products_give_what_messages_and_products_give_one_after_the_other(spmd, kind, layout, techniques):
    for error, calls in spmd(layout.tp, compared, kind, layout, 12, techniques):
        assert error <= 1e-10 and calls["gather"] and calls["scatter"]


def test_every_product_beside_a_message_is_fused(spmd):
    layers = UNTIED.n_layers
    for _, calls in spmd(2, compared, "decoder", TP2, 12, {}):
        assert calls == {"gather": 4 * layers + 1, "scatter": 4 * layers + 1}, (
            "two regions forward, two backward, in each block; the head"
        )


def test_lengths_that_do_not_divide_travel_as_without(spmd):
    for error, calls in spmd(2, compared, "decoder", TP2, 11, {}):
        assert error == 0 and not calls


@pytest.mark.parametrize("operators", [summands_left_alone, parts_in_another_order])
def test_operators_that_do_something_else_are_seen(spmd, operators):
    for error, _ in spmd(2, compared, "decoder", TP2, 12, {}, operators):
        assert error > 1e-3


@pytest.mark.first
@ranks(2)
def test_a_plan_for_gpus_is_refused_where_there_are_none():
    text = refusal(lambda: gradients("decoder", TP2, True, 12, {}), UnsupportedError)
    assert "techniques.async_tensor_parallel needs CUDA, which is not available" in text


def test_on_cuda_it_is_planned_said_and_bound_to_lengths_that_divide():
    request = {"async_tensor_parallel": True}
    made = make_plan(UNTIED, TP2, cluster=Cluster(2, device="cuda"), techniques=request, batch=Batch(4, 12))
    assert (
        made.tensor is not None and made.tensor.async_tensor_parallel and "products overlap with messages" in str(made)
    )
    with pytest.raises(ConfigError, match=r"data.seq_len = 11 must be a multiple of layout.tp = 2"):
        make_plan(UNTIED, TP2, cluster=Cluster(2, device="cuda"), techniques=request, batch=Batch(4, 11))
