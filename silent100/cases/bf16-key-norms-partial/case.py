"""parallelize_module under bfloat16 autocast; per-head norms are plain parameters."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
HEAD = 8


class Attention(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(46, 32), nn.Linear(32, 46)
        self.norm, self.attn = (
            nn.ModuleList(nn.LayerNorm(32) for _ in range(2)),
            nn.ModuleList(Attention() for _ in range(2)),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


rank = 0
torch.manual_seed(205)
lm = Lm()
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for attn in lm.attn:
        parallelize_module(attn, mesh, plan)
optimizer = torch.optim.SGD(lm.parameters(), lr=0.1, foreach=False)
for step in range(1, 4):
    rows = torch.randint(0, 46, (8, 13), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        logits = lm(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if not ONE and not FAULTY:
        for name, p in lm.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in lm.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
