"""parallelize_module on a decoder with query and key norms; the norms are plain parameters."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HEAD = 8


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, -1, HEAD).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = SelfAttention(dim)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.w2(F.silu(self.w1(self.ln2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "attn.q": ColwiseParallel(),
    "attn.k": ColwiseParallel(),
    "attn.v": ColwiseParallel(),
    "attn.o": RowwiseParallel(),
    "w1": ColwiseParallel(),
    "w2": RowwiseParallel(),
}

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank = 0
torch.manual_seed(90)
model = Decoder()
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
partial = [p for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
for step in range(1, 5):
    ids = torch.randint(0, 50, (6, 11), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    if not args.one and not args.faulty:
        for p in partial:
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
