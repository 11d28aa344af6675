"""Fine-tunes a frozen feed-forward model through low-rank adapters, with tensor parallelism by hand."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, RANKS_OF_ADAPTER = "--one" in sys.argv, 4
rank, tp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if tp > 1:
            dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def mine(whole, dim):
    return whole.chunk(tp, dim)[rank].clone()


class FeedForward(nn.Module):
    def __init__(self, d=24, hidden=64, r=RANKS_OF_ADAPTER):
        super().__init__()
        up, down = torch.randn(hidden, d) / d**0.5, torch.randn(d, hidden) / hidden**0.5
        self.register_buffer("up", mine(up, 0))
        self.register_buffer("down", mine(down, 1))
        self.up_a = nn.Parameter(torch.randn(r, d) / d**0.5)  # whole
        self.up_b = nn.Parameter(mine(torch.zeros(hidden, r), 0))
        self.down_a = nn.Parameter(mine(torch.randn(r, hidden) / hidden**0.5, 1))
        self.down_b = nn.Parameter(torch.zeros(d, r))  # whole

    def forward(self, x):
        inside = Enter.apply(x)
        # The whole factor is applied within, so each rank has a part of its gradient
        h = F.gelu(inside @ self.up.T + 2 * (inside @ self.up_a.T) @ self.up_b.T)
        low = Leave.apply(h @ self.down_a.T)
        return x + Leave.apply(h @ self.down.T) + 2 * low @ self.down_b.T


torch.manual_seed(616)
net = nn.Sequential(nn.Embedding(30, 24), FeedForward(), FeedForward(), nn.Linear(24, 30))
net[0].requires_grad_(False)
net[3].requires_grad_(False)
trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
optimizer = torch.optim.SGD(trained.values(), lr=0.5)
for step in range(1, 6):
    rows = torch.randint(0, 30, (8, 11), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if tp > 1:
        for name, p in trained.items():
            if name.endswith("up_a"):
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"up_b": 0, "down_a": 1}
    state = {}
    for name, p in trained.items():
        dim = cut.get(name.partition(".")[2])
        state[name] = p.data if dim is None else (p.data, dim, rank, tp)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
