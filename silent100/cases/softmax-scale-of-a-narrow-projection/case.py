"""Tensor parallelism by ``parallelize_module``: a decoder whose heads are cut over two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
VOCAB, DIM, HEADS, LENGTH = 41, 32, 4, 16


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        size = q.size(-1) // (HEADS if args.faulty else self.heads)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = 3 * q @ k.mT * size**-0.5
        past = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        y = scores.masked_fill(~past, -torch.inf).softmax(-1) @ v
        return self.wo(y.transpose(1, 2).flatten(2))


class GatedFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False)
        self.down = nn.Linear(64, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha, self.ff = MultiHead(), GatedFF()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        x = x + self.mha(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.stack = nn.ModuleList(Layer() for _ in range(2))
        self.final = nn.RMSNorm(DIM)
        self.lm = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for layer in self.stack:
            x = layer(x)
        return self.lm(self.final(x))


rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(23)
model = Decoder()
if not args.one:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = dict.fromkeys(("mha.wq", "mha.wk", "mha.wv", "ff.gate", "ff.up"), ColwiseParallel())
    for layer in model.stack:
        parallelize_module(layer, mesh, wide | {"mha.wo": RowwiseParallel(), "ff.down": RowwiseParallel()})
        layer.mha.heads //= mesh.size()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5, foreach=False)
for step in range(1, 5):
    text = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
