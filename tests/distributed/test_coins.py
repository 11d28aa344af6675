"""Layers that a coin skips: no hang on any layout, whoever tosses it; refused where stages or tokens are cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.ranks import ranks
from support.users import VOCABULARY, User
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize, plan
from meshwright.distributed.mesh import data_position

COINS = {
    "torch": lambda: float(torch.rand(())),
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
}
FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}


class Skips(User):
    def __init__(self, coin: str, blocks: int, chance: float = 0.5):
        super().__init__(blocks=blocks)
        self.coin, self.chance = COINS[coin], chance
        self.config.coin = (coin, chance)

    def forward(self, tokens):
        x = self.embedded(tokens)
        for layer in self.layers:
            if self.training and self.coin() < self.chance:
                continue
            x = layer(x)
        return self.logits(x)


def trained(coin, blocks, sizes):
    torch.manual_seed(0)
    model = parallelize(Skips(coin, blocks).double(), Layout(**sizes), techniques=FP64, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, ranks = data_position(model.mesh)
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    losses = []
    for step in range(6):
        tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        given = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
        losses.append(float(model.forward_backward({k: v.chunk(ranks)[rank] for k, v in given.items()}).loss))
        model.optimizer_step(optimizer)
    return losses


@pytest.mark.first("torch-2-{'dp_replicate': 2, 'dp_shard': 1}")
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}], ids=str)
@pytest.mark.parametrize("blocks", [2, 6])
@pytest.mark.parametrize("coin", COINS)
def test_nothing_hangs(coin, blocks, sizes, spmd):
    first, second = spmd(2, trained, coin, blocks, sizes, timeout=60.0)
    assert first == second and all(0 < loss < 10 for loss in first)


@pytest.mark.all
@pytest.mark.parametrize("sizes", [{"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1}], ids=str)
@pytest.mark.parametrize("coin", COINS)
def test_cut_stages_and_tokens_are_refused(coin, sizes):
    with pytest.raises(UnsupportedError, match="only some rows use layers.0"):
        plan(Skips(coin, 6), Layout(**sizes))


@pytest.mark.all
@pytest.mark.parametrize("coin", COINS)
def test_cut_rows_are_refused(coin):
    """Ranks with parts of one row would toss for themselves, and wait in attention for each other."""
    with pytest.raises(UnsupportedError, match="some batches or draws pass over layers"):
        plan(Skips(coin, 6), Layout(cp=2, dp_shard=1))


def toss_again(step, rank):
    random.seed(100 * step + rank), np.random.seed(100 * step + rank), torch.manual_seed(100 * step + rank)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}], ids=str)
@pytest.mark.parametrize("blocks", [2, 6])
@pytest.mark.parametrize("coin", COINS)
@ranks(2, timeout=60.0)
def test_ranks_toss_for_their_own_rows_as_one_process_does(coin, blocks, sizes):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Skips(coin, blocks).double())
    reference, model = models[0], parallelize(models[1], Layout(**sizes), techniques=FP64, audit=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    rank, ranks = data_position(model.mesh)
    found = {}
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        given = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
        total = 0.0
        optimizers[0].zero_grad()
        for other in range(ranks):
            toss_again(step, other)
            own = {k: v.chunk(ranks)[other] for k, v in given.items()}
            logits = reference(own["tokens"]).flatten(0, 1)
            loss = F.cross_entropy(logits, own["labels"].flatten(), reduction="sum") / tokens.numel()
            loss.backward()
            total += float(loss)
        optimizers[0].step()
        toss_again(step, rank)
        found[step] = abs(
            float(model.forward_backward({k: v.chunk(ranks)[rank] for k, v in given.items()}).loss) - total
        )
        model.optimizer_step(optimizers[1])
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        found[name] = float((whole - expected[name]).norm() / expected[name].norm())
    found = {name: error for name, error in found.items() if not error <= 1e-10}
    assert found == {}


@pytest.mark.all
@pytest.mark.parametrize("coin", COINS)
def test_a_coin_without_a_chance_skips_nothing(coin):
    assert plan(Skips(coin, 2, chance=0.0), Layout(tp=2, dp_shard=1)).tensor is not None
