"""Layouts with a context axis: what windows and recomputation send, and what no way of the array asks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.laid_out import assert_estimated, counted, estimated
from support.mixing import WIDTH, Model, causal, far_window, windowed
from support.ranks import ranks, refusal

from meshwright import ConfigError, Layout, UnsupportedError, parallelize
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.process.world import get_world_info
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.collectives import step_traffic
from meshwright.planning.values import Batch

pytestmark = pytest.mark.all

DECODER = DecoderConfig(vocab_size=61, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)


def by(method: str) -> dict[str, str]:
    return {"context_parallel_method": method}


def step_on_the_wire(techniques: dict) -> tuple:
    model = parallelize(DECODER, Layout(dp_shard=1, cp=4), techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    for warm in (False, True):
        with WireCounter() if warm else nullcontext() as wire:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizer, 1.0)
    return estimated(model.plan, Batch(2, 24)), counted(wire)


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses_ring"])
@pytest.mark.parametrize("keep", [("attention", "matmuls"), ("collectives",), ("matmuls",)], ids="-".join)
def test_what_a_recomputation_sends_again_is_what_the_plan_says(spmd, method, keep):
    techniques = by(method) | {"activation_checkpointing": "selective_op", "checkpoint_keep": keep}
    for said, found in spmd(4, step_on_the_wire, techniques):
        assert_estimated(said, found)


def window_on_the_wire() -> tuple[float, float, float]:
    """Bytes of keys and values by the plan, those of this rank, and its part of all tokens."""
    torch.manual_seed(0)
    model = parallelize(Model(windowed), Layout(dp_shard=1, cp=4))
    tokens = torch.randint(0, 61, (2, 32), generator=torch.Generator().manual_seed(0))
    with WireCounter() as wire:
        model.forward_backward({"tokens": tokens, "labels": tokens})
    (planned,) = [t.bytes for t in step_traffic(model.plan, Batch(2, 32)) if t.op == "all_to_all"]
    sent = [sent.bytes for sent in wire.sent if sent.op == "all_to_all"]
    return planned, sum(sent), len(sent)


def test_a_window_moves_what_the_plan_says_and_no_more(spmd):
    found = spmd(4, window_on_the_wire)
    planned = found[0][0]
    assert planned == 2 * 2 * 2 * 4 * 2 * WIDTH * 4, (
        "2 layers, both ways, 2 rows, 4 tokens before a run, 2 widths, fp32"
    )
    assert max(sent for _, sent, _ in found) == pytest.approx(planned, rel=1e-12)
    assert all(calls == 4 for *_, calls in found)


def causal_halo_on_the_wire() -> tuple[float, float]:
    """Bytes by the plan, and those of this rank: fetched keys and values, and gradients that go back."""
    torch.manual_seed(0)
    model = parallelize(Model(causal), Layout(dp_shard=1, cp=4), techniques=by("halo"))
    tokens = torch.randint(0, 61, (2, 30), generator=torch.Generator().manual_seed(0))
    with WireCounter() as wire:
        model.forward_backward({"tokens": tokens, "labels": tokens})
    (planned,) = [t.bytes for t in step_traffic(model.plan, Batch(2, 30)) if t.op == "all_to_all"]
    return planned, sum(sent.bytes for sent in wire.sent if sent.op == "all_to_all")


def test_a_halo_of_whole_rows_moves_what_the_plan_says(spmd):
    found = spmd(4, causal_halo_on_the_wire)
    assert max(sent for _, sent in found) == pytest.approx(found[0][0], rel=1e-12)


@pytest.mark.first
@ranks(2)
def test_ranks_of_the_axis_that_bring_other_rows_are_refused():
    model = parallelize(DECODER, Layout(dp_shard=1, cp=2))
    tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(get_world_info()[0]))
    said = refusal(lambda: model.forward_backward({"tokens": tokens, "labels": tokens}), ConfigError)
    assert "ranks of the cp axis brought different rows" in said


def rows_beyond_a_window(length: int) -> str:
    torch.manual_seed(0)
    beyond_rehearsed = partial(far_window, length=600)
    model = parallelize(Model(beyond_rehearsed, longest=700), Layout(dp_shard=1, cp=2))
    tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(0))
    return refusal(lambda: model.forward_backward({"tokens": tokens, "labels": tokens}), UnsupportedError)


def test_rows_in_which_a_mask_turns_out_to_be_another_are_refused(spmd):
    assert spmd(2, rows_beyond_a_window, 60) == ["", ""]
    for said in spmd(2, rows_beyond_a_window, 640):
        assert "masks rows of 640 tokens by another rule than the one that was measured (causal)" in said


def evaluated() -> tuple[float, list[int]]:
    cp = 2 if get_world_info()[2] > 1 else 1
    model = parallelize(DECODER, Layout(dp_shard=1, cp=cp), techniques={"precision": {"master": "float64"}})
    tokens = torch.randint(0, 61, (2, 22), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens}
    model.forward_backward(batch)
    return float(model.evaluate(batch)), model.generate([3, 1, 4], 6, seed=1)


def test_evaluation_and_generation_are_those_of_one_process(spmd):
    (loss, text), *_ = spmd(1, evaluated)
    for found, ids in spmd(2, evaluated):
        assert abs(found - loss) < 1e-12 and ids == text


def in_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Attend as ``support.mixing.windowed``, by a mask that is made for the tokens that the model is given."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(row, head, query, key):
        near = (key <= query) & (query - key < 5)
        return near if documents is None else near & (documents[row, query] == documents[row, key])

    return flex_attention(q, k, v, block_mask=create_block_mask(allowed, len(q), None, q.shape[2], q.shape[2], "cpu"))


PACKED = {
    "tokens": torch.randint(0, 61, (2, 26), generator=torch.Generator().manual_seed(0)),
    "document_ids": torch.repeat_interleave(torch.arange(3), torch.tensor([5, 9, 12])).expand(2, -1).contiguous(),
}


def flex_losses(cp: int) -> list[float]:
    torch.manual_seed(0)
    model = parallelize(
        Model(in_documents).double(), Layout(dp_shard=1, cp=cp), techniques={"precision": {"master": "float64"}}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        found.append(float(model.forward_backward(PACKED | {"labels": PACKED["tokens"]})))
        model.optimizer_step(optimizer)
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_steps_with_flex_attention_are_those_of_one_process_with_plain_torch(spmd, cp):
    torch.manual_seed(0)
    model = Model(windowed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(PACKED["tokens"], document_ids=PACKED["document_ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), PACKED["tokens"].flatten())
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for found in spmd(cp, flex_losses, cp):
        assert found == pytest.approx(expected, abs=1e-12)
    assert expected[0] - expected[2] > 0.1
