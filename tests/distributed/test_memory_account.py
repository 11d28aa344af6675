"""What a step's memory is held for: told apart as it is, beside the plan's figures."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import own_rows

from meshwright import Layout
from meshwright.distributed.memory import account as memory_account
from meshwright.distributed.memory.account import MemoryAccount
from meshwright.distributed.memory.live import storage_of
from meshwright.distributed.parallelize import parallelize
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.memory import MemoryUse
from meshwright.training.memory import MemoryShares, estimated
from meshwright.verification.problem import RandomBatches

VOCABULARY, ROWS, SEQ = 258, 8, 32
MODEL = DecoderConfig(VOCABULARY, 64, 4, 4, 2, 128, 64)
FSDP2 = Layout(dp_shard=2)


def accounted(
    layout: Layout, techniques: dict[str, Any], rows: int
) -> tuple[dict[MemoryUse, int], dict[MemoryUse, int]]:
    laid = parallelize(MODEL, layout, techniques=techniques, seed=1, microbatch_rows=rows)
    optimizer = torch.optim.AdamW(laid.parameters())
    batch = own_rows(laid, RandomBatches(VOCABULARY, rows=ROWS, seq_len=SEQ)(0))
    account = MemoryAccount(laid.parts, {VOCABULARY, VOCABULARY // layout.tp})
    with patch.object(memory_account, "UNSEEN", 0.0), account:
        laid.forward_backward(batch)
    laid.optimizer_step(optimizer)
    account.add_optimizer(optimizer)
    return dict(account.most), estimated(laid.plan, MemoryShares(rows, len(batch["tokens"]) // rows))


LAYOUTS = {
    "one process": (Layout(dp_shard=1), {}),
    "sharded": (FSDP2, {}),
    "sharded, recomputed": (FSDP2, {"activation_checkpointing": "full"}),
    "replicated": (Layout(dp_replicate=2, dp_shard=1), {}),
    "tensor": (Layout(dp_shard=2, tp=2), {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_are_what_the_plan_said(spmd, name):
    layout, techniques = LAYOUTS[name]
    for found, planned in spmd(layout.world, accounted, layout, techniques, 2):
        assert found[MemoryUse.PARAMETERS] == planned[MemoryUse.PARAMETERS]
        assert found[MemoryUse.OPTIMIZER] == pytest.approx(planned[MemoryUse.OPTIMIZER], rel=1e-2), (
            "uneven shards are filled up"
        )
        assert 0.9 * planned[MemoryUse.GRADIENTS] <= found[MemoryUse.GRADIENTS] <= planned[MemoryUse.GRADIENTS]


@pytest.mark.all
def test_switches_change_what_they_are_about(spmd):
    plain, recomputed, chunked = (
        spmd(2, accounted, FSDP2, techniques, 4)[0][0]
        for techniques in ({}, {"activation_checkpointing": "full"}, {"loss_chunks": 4})
    )
    assert recomputed[MemoryUse.ACTIVATIONS] < plain[MemoryUse.ACTIVATIONS] / 2
    assert (
        recomputed[MemoryUse.LOGITS] == plain[MemoryUse.LOGITS]
        and plain[MemoryUse.LOGITS] % (4 * SEQ * VOCABULARY * 4) == 0
    )
    assert chunked[MemoryUse.LOGITS] < plain[MemoryUse.LOGITS] / 2
    assert plain[MemoryUse.COMMUNICATION] > 0


def test_a_vocabulary_of_a_width_of_the_model_tells_no_logits():
    model = torch.nn.Linear(8, 8)
    with MemoryAccount([model], {8}) as account:
        model(torch.ones(4, 8)).sum().backward()
    assert MemoryUse.LOGITS not in account.most and account.most[MemoryUse.ACTIVATIONS] >= 4 * 8 * 4
    assert account.most[MemoryUse.GRADIENTS] == account.most[MemoryUse.PARAMETERS] == (64 + 8) * 4
    assert account.peak.total() >= account.most[MemoryUse.GRADIENTS] + account.most[MemoryUse.PARAMETERS]


def test_the_account_keeps_no_gradient_alive():
    """A validation after the step would be counted beside gradients that are gone."""
    model = torch.nn.Linear(64, 64, bias=False)
    with MemoryAccount([model], {8}) as account:
        model(torch.ones(4, 64)).sum().backward()
        account.look()
        model.weight.grad = None
        assert account._storages.bytes[MemoryUse.GRADIENTS] == 0


def test_no_address_of_a_freed_state_is_taken_for_one_at_rest():
    """A message that Python puts there would be counted among activations."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones(8, 8)
    optimizer.step()
    with MemoryAccount([model], {8}, optimizer=optimizer) as account:
        addresses = [id(storage_of(t)) for t in (model.weight, optimizer.state[model.weight]["momentum_buffer"])]
        assert addresses == list(account._resting)
        optimizer.state.clear()
        assert addresses[:1] == list(account._resting)
