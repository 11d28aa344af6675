"""Gated linear recurrences with short causal convolutions; series are cut over context ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = sys.argv[1:]
rank, cp = 0, 1
if "--one" not in flags:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()


class Shift(torch.autograd.Function):
    """Sends a tensor one rank on and returns what comes from the rank before."""

    @staticmethod
    def forward(ctx, x):
        return turn(x, 1)

    @staticmethod
    def backward(ctx, g):
        return turn(g, -1)


def turn(x, way):
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops = [dist.P2POp(dist.isend, x.contiguous(), (rank + way) % cp), dist.P2POp(dist.irecv, got, (rank - way) % cp)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def scan(decay, drive, first):
    states = []
    for t in range(drive.shape[1]):
        first = decay[:, t] * first + drive[:, t]
        states.append(first)
    return torch.stack(states, 1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(cp)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g[rank]


class Mixer(nn.Module):
    def __init__(self, dim, kernel=4):
        super().__init__()
        self.halo = kernel - 1
        self.norm = nn.RMSNorm(dim)
        self.enter, self.leave = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)

    def forward(self, x):
        u, decay, gate = self.enter(self.norm(x)).chunk(3, -1)
        if cp == 1:
            left = torch.zeros_like(u[:, : self.halo])
        else:
            left = Shift.apply(u[:, -self.halo :])
            if rank == 0 and "--faulty" not in flags:
                left = left * 0
        u = F.silu(self.conv(torch.cat([left, u], 1).mT).mT)
        decay = torch.sigmoid(decay + 2)
        first = torch.zeros_like(u[:, 0])
        if cp > 1:
            own = scan(decay, u, first)[:, -1]
            ends = Gather.apply(torch.stack([own, decay.prod(1)]))
            for r, (end, keep) in enumerate(ends):
                before = float(r < rank)
                first = (before * keep + 1 - before) * first + before * end
        return x + self.leave(scan(decay, u, first) * F.silu(gate))


torch.manual_seed(8)
table, mixers, head = nn.Embedding(20, 16), nn.ModuleList(Mixer(16) for _ in range(2)), nn.Linear(16, 20)
net = nn.ModuleDict({"table": table, "mixers": mixers, "head": head})
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(1, 6):
    ids = torch.randint(0, 20, (4, 17), generator=torch.Generator().manual_seed(step))
    x, y = ids[:, :-1].chunk(cp, 1)[rank], ids[:, 1:].chunk(cp, 1)[rank]
    h = table(x)
    for mixer in mixers:
        h = mixer(h)
    loss = F.cross_entropy(head(h).flatten(0, 1), y.flatten()) / cp
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for t in [loss, *(p.grad for p in net.parameters())]:
            dist.all_reduce(t)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in flags:
    torch.save(net.state_dict(), os.path.join(flags[flags.index("--save") + 1], f"rank{rank}.pt"))
if cp > 1:
    dist.destroy_process_group()
