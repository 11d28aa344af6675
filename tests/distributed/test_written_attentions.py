"""Models with hand-written attention on real ranks: losses and gradients of one process."""

from __future__ import annotations

import runpy

import pytest
import torch
import torch.nn.functional as F
from support.attentions import spelled
from support.from_pages import SCRIPTS
from support.users import VOCABULARY
from support.written_out import GPT, GPTConfig
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize
from meshwright.distributed.mesh import data_position

EXACT = 1e-10
FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
WAYS = {
    "tp": (2, {"tp": 2, "dp_shard": 1}, {}),
    "tp, whole sequences": (2, {"tp": 2, "dp_shard": 1}, {"sequence_parallel": False}),
    "dp_shard and tp, recomputed": (4, {"dp_shard": 2, "tp": 2}, {"activation_checkpointing": "full"}),
    "pp": (2, {"pp": 2, "dp_shard": 1}, {}),
}


def made(name):
    torch.manual_seed(0)
    if name == "yours":  # its heads are counted by the block itself
        return runpy.run_path(str(SCRIPTS / "yours.py"))["YourDecoder"]().double()
    return GPT(GPTConfig(vocab_size=VOCABULARY)).double() if name == "published" else spelled(name).double()


def batch():
    tokens = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def plain(name):
    model, given = made(name), batch()
    loss = F.cross_entropy(model(given["tokens"]).flatten(0, 1), given["labels"].flatten())
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def error(name, sizes, techniques):
    model, expected = parallelize(made(name), Layout(**sizes), techniques=FP64 | techniques), plain(name)
    rank, ranks = data_position(model.mesh)
    found = {"loss": model.forward_backward({k: v.chunk(ranks)[rank] for k, v in batch().items()}).loss}
    for n, p in model.named_parameters():
        found[n] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    cut = model.plan.tensor.kinds if model.plan.tensor else ()
    assert {planned.region.kind for kind in cut for planned in kind.regions} in (set(), {"attention", "feed_forward"})
    return {n: float((value - expected[n]).norm() / expected[n].norm().clamp(min=1e-9)) for n, value in found.items()}


@pytest.mark.parametrize("name", ["NanoGPT", "MinGPT", "Packed", "published", "yours"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_process(way, name, spmd):
    world, sizes, techniques = WAYS[way]
    for found in spmd(world, error, name, sizes, techniques):
        assert {n: e for n, e in found.items() if not e <= EXACT} == {}
