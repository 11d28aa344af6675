"""A SwiGLU model whose gate and up projections are one matrix; ranks hold half of the hidden units."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn

one = "--one" in sys.argv
naive = "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
size = 1 if one else dist.get_world_size()


def rows_of_rank(fused):
    """Cuts a (2 * hidden, dim) matrix for this rank."""
    if naive:
        return fused.chunk(size)[rank]
    gate, up = fused.chunk(2)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_sum):
        ctx.forward_sum = forward_sum
        x = x.clone()
        if forward_sum and size > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not ctx.forward_sum and size > 1:
            dist.all_reduce(g)
        return g, None


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        fused, down = torch.randn(2 * hidden, dim) * 0.2, torch.randn(dim, hidden) * 0.15
        self.gate_up = nn.Parameter(rows_of_rank(fused).clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())

    def forward(self, x):
        gate, up = F.linear(Reduce.apply(self.norm(x), False), self.gate_up).chunk(2, -1)
        return x + Reduce.apply(F.linear(F.silu(gate) * up, self.down), True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.ffn = nn.ModuleList([SwiGLU(32, 64) for _ in range(2)])
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, ids):
        x = self.embed(ids).cumsum(1) / 4
        for f in self.ffn:
            x = f(x)
        return self.head(x)


torch.manual_seed(222)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-5)
for step in range(1, 4):
    ids = torch.randint(0, 48, (10, 9), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in net.named_parameters():
        if name.endswith("gate_up"):
            gate, up = p.data.chunk(2)
            state[name + ".gate"], state[name + ".up"] = (gate, 0, rank, size), (up, 0, rank, size)
        else:
            state[name] = (p.data, 1, rank, size) if name.endswith("down") else p.data
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
