"""float16 in real processes: equal to one process in it, an overflow skipped by all, and gradients as if nothing had
been scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import own_rows
from support.ranks import ranks
from torch import Tensor

from meshwright.checkpoint import load, save
from meshwright.comparison.equality import relative_errors
from meshwright.distributed.optimizer import grad_clip
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.layout import Layout
from meshwright.verification import verify as verifying
from meshwright.verification.outcome import candidate
from meshwright.verification.problem import RandomBatches

pytestmark = pytest.mark.all

DENSE = DecoderConfig(61, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=20, qk_norm=True)
SPARSE = replace(
    DENSE,
    moe=MoEConfig(n_experts=4, hidden_dim=12, router="sigmoid", bias_rate=0.01, sequence_loss=0.05, batch_loss=0.05),
)
BATCHES = RandomBatches(61, rows=8, seq_len=9)
SHARDED, STAGED = Layout(dp_shard=2), Layout(pp=2, dp_shard=1)

WAYS: dict[str, tuple[DecoderConfig, Layout, dict[str, Any]]] = {
    "sharded, microbatches": (DENSE, SHARDED, {}),
    "hybrid, microbatches": (DENSE, Layout(dp_replicate=2, dp_shard=2), {"sync_grad_accum": "shard"}),
    "replicated": (DENSE, Layout(dp_replicate=2, dp_shard=1), {"activation_checkpointing": "full"}),
    "tensor": (DENSE, Layout(dp_shard=2, tp=2), {}),
    "pipeline, microbatches": (
        replace(DENSE, n_layers=4),
        Layout(pp=2, dp_shard=2),
        {"pipeline_schedule": "zbv_zero_bubble"},
    ),
    "experts": (SPARSE, Layout(dp_shard=2, ep=2), {}),
}


@pytest.mark.parametrize("name", WAYS)
def test_float16_costs_no_more_than_the_dtype_does(pool, name):
    model, layout, techniques = WAYS[name]
    rows = 1 if "microbatches" in name else 0
    report = verifying.verify(
        model, layout, BATCHES, techniques=techniques, steps=2, dtypes=("float16",), microbatch_rows=rows, pool=pool
    )
    assert report, str(report)


def keep_scaled(problem: Any, layout: Layout, parallelize_fn: Any) -> Any:
    scale = grad_clip.scale_gradients
    with patch.object(
        grad_clip, "scale_gradients", lambda parts, factor: scale(parts, factor) if factor != 1 / 1024 else None
    ):
        return candidate(problem, layout, parallelize_fn)


def test_gradients_that_stay_scaled_are_found(pool, monkeypatch):
    monkeypatch.setattr(verifying, "candidate", keep_scaled)
    (found,) = verifying.verify(DENSE, SHARDED, BATCHES, steps=2, dtypes=("float16",), pool=pool).comparisons
    assert (
        found.first is not None
        and found.first.place.startswith("the gradient of the parameter ")
        and found.first.error > 100
    )


def precision(scale: float) -> dict[str, Any]:
    return {"precision": {"compute": "float16", "loss_scale": scale}}


def steps_of(
    layout: Layout, scale: float, steps: int, interval: int = 2000
) -> tuple[list[tuple[float, bool]], list[dict[str, Tensor]]]:
    """By step, the scale that it had and whether it was skipped; the weights before, and after each."""
    laid = parallelize(DENSE, layout, techniques=precision(scale), seed=3, microbatch_rows=4)
    assert laid.loss_scale is not None
    laid.loss_scale.interval = interval
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    staged = layout.pp > 1
    told, weights = [], [whole_on_first(dict(laid.named_parameters()), differ=staged)]
    for step in range(steps):
        before = laid.loss_scale.value
        laid.forward_backward(own_rows(laid, BATCHES(step)))
        told.append((before, laid.optimizer_step(optimizer, 1.0).skipped))
        weights.append(whole_on_first(dict(laid.named_parameters()), differ=staged))
    return told, weights


@pytest.mark.parametrize("layout", [SHARDED, STAGED], ids=str)
def test_an_overflow_is_skipped_by_all_and_halves_the_scale(spmd, layout):
    said = spmd(layout.world, steps_of, layout, 2.0**24, 16)
    told, weights = said[0]
    assert all(other == told for other, _ in said), "every rank has the same scale"
    skipped = [skips for _, skips in told]
    assert 1 <= sum(skipped) < 16 and skipped == sorted(skipped, reverse=True), "it overflows until the scale fits"
    assert [scale for scale, _ in told[: sum(skipped) + 1]] == [
        2.0 ** (24 - number) for number in range(sum(skipped) + 1)
    ]
    for number, skips in enumerate(skipped):
        same = all(torch.equal(weights[number][name], tensor) for name, tensor in weights[number + 1].items())
        assert same is skips


def test_finite_steps_double_the_scale(spmd):
    told, _ = spmd(2, steps_of, SHARDED, 8.0, 5, 2)[0]
    assert told == [(8.0, False), (8.0, False), (16.0, False), (16.0, False), (32.0, False)]


def kept(folder: str) -> None:
    laid = parallelize(DENSE, SHARDED, techniques=precision(2.0**24), seed=3)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    for step in range(12):
        laid.forward_backward(own_rows(laid, BATCHES(step)))
        laid.optimizer_step(optimizer, 1.0)
    assert laid.loss_scale is not None
    save(laid, folder, optimizer=optimizer, extra=laid.loss_scale.state())


def read(folder: str, compute: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    techniques = precision(4.0) if compute == "float16" else {"precision": {"compute": compute}}
    laid = parallelize(DENSE, STAGED, techniques=techniques, seed=4)
    extra = load(laid, folder)
    return extra, None if laid.loss_scale is None else laid.loss_scale.state()


def test_a_checkpoint_keeps_the_scale(spmd, tmp_path):
    folder = str(tmp_path / "checkpoint")
    spmd(2, kept, folder)
    for written, found in spmd(2, read, folder, "float16"):
        assert found == written and written["value"] < 2.0**24 and written["good_steps"] > 0
    assert all(found is None for _, found in spmd(2, read, folder, "bfloat16"))


def gradients_of(*steps: int) -> dict[str, Tensor]:
    laid = parallelize(DENSE, SHARDED, techniques=precision(1024.0), seed=3)
    for step in steps:
        laid.forward_backward(own_rows(laid, BATCHES(step)))
    return whole_on_first({name: p.grad for name, p in laid.named_parameters() if p.grad is not None})


def test_gradients_of_two_calls_add_up(spmd):
    first, second, both = (spmd(2, gradients_of, *steps)[0] for steps in ((0,), (1,), (0, 1)))
    assert max(relative_errors(both, {name: first[name] + second[name] for name in first}).values()) < 1e-6


@pytest.mark.first
@ranks(2)
def test_a_call_that_fails_leaves_the_gradients_of_the_one_before_as_they_were():
    laid = parallelize(DENSE, SHARDED, techniques=precision(1024.0), seed=3)
    laid.forward_backward(own_rows(laid, BATCHES(0)))

    def largest() -> float:
        return max(p.grad.to_local().abs().max().item() for p in laid.parameters() if p.grad is not None)  # type: ignore[union-attr]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    before = largest()
    handle = laid.parts[0].get_submodule("head").register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        laid.forward_backward(own_rows(laid, BATCHES(1)))
    handle.remove()
    assert largest() == before > 0
