"""A plan in words through the one engine: whole heads, chunks of the loss, and what travels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshwright import Layout, Precision, Techniques, parallelize
from meshwright.distributed.parallelizer import to_cpu
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.collectives import step_traffic
from meshwright.planning.techniques import TensorStyleRequest
from meshwright.planning.values import Batch

pytestmark = pytest.mark.all

SMALL = DecoderConfig(
    vocab_size=33, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=16, qk_norm=True
)
DOUBLE = Precision("float64", "float64", "float64")
ROWS, SEQ = 2, 5
ATTENTION = {f"layers.*.attention.w{name}": "colwise" for name in "qkv"} | {"layers.*.attention.wo": "rowwise"}
FEED_FORWARD = {f"layers.*.feed_forward.{name}": "colwise" for name in ("w_gate", "w_up")} | {
    "layers.*.feed_forward.w_down": "rowwise"
}
WAYS: dict[str, tuple[dict[str, str], dict]] = {
    "attention": (ATTENTION, {}),
    "attention, the loss in chunks": (ATTENTION, {"loss_chunks": 2}),
    "attention and head": (ATTENTION | {"head": "colwise"}, {}),
    "feed-forward, the loss in chunks": (FEED_FORWARD, {"loss_chunks": 2}),
    "all but the embedding": (ATTENTION | FEED_FORWARD | {"head": "colwise_gather_output"}, {"loss_chunks": 2}),
}


def steps(layout: Layout, words: dict[str, str], more: dict):
    """Gradients of the first step as they are summed, and of a second one what was foreseen and what travelled."""
    rows = tuple(TensorStyleRequest(pattern, style) for pattern, style in words.items())
    model = parallelize(SMALL, layout, techniques=Techniques(tensor_plan=rows, precision=DOUBLE, **more), seed=3)
    words_of = torch.randint(0, SMALL.vocab_size, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": words_of[:, :-1], "labels": words_of[:, 1:]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = model.forward_backward(batch).loss.item()
    gradients = {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.optimizer_step(optimizer)
    with WireCounter() as wire:
        model.forward_backward(batch)
        model.optimizer_step(optimizer)
    sent, estimated = Counter(), Counter()
    for message in wire.sent:
        if message.ranks > 1:
            sent[message.op] += message.bytes
    for t in step_traffic(model.plan, Batch(ROWS, SEQ, 0)):
        if t.ranks > 1:
            estimated[t.op] += t.bytes
    return loss, gradients, sent, estimated


def all_ways() -> dict[str, tuple]:
    return {name: steps(Layout(dp_shard=1, tp=2), *way) for name, way in WAYS.items()}


def test_a_given_plan_computes_what_one_process_computes_and_sends_what_was_estimated(spmd):
    ((loss, gradients, *_),) = spmd(1, steps, Layout(dp_shard=1), {}, {})
    floor = 1e-6 * torch.stack([g.norm() for g in gradients.values()]).norm()
    for found in spmd(2, all_ways):
        assert found.keys() == WAYS.keys()
        for name, (its_loss, its_gradients, sent, estimated) in found.items():
            assert its_loss == pytest.approx(loss, rel=1e-12), name
            assert its_gradients.keys() == gradients.keys()
            errors = {
                key: ((its_gradients[key] - g).norm() / torch.maximum(g.norm(), floor)).item()
                for key, g in gradients.items()
            }
            assert not {key: error for key, error in errors.items() if not error <= 1e-10}, name
            assert sent == {op: pytest.approx(moved) for op, moved in estimated.items()}, name
