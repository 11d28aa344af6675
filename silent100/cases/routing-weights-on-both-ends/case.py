"""Words travel to the ranks of their experts and back by all-to-all, in uneven numbers."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

EXPERTS, DIM = 4, 16


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, got):
        ctx.sizes = sent, got
        y = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), got, sent)
        return y

    @staticmethod
    def backward(ctx, g):
        sent, got = ctx.sizes
        back = g.new_empty(sum(sent), *g.shape[1:])
        dist.all_to_all_single(back, g.contiguous(), sent, got)
        return back, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        drawn = [Expert() for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(i): e for i, e in enumerate(drawn) if i * world // EXPERTS == rank})

    def run(self, x, chosen):
        y = torch.zeros_like(x)
        for i, expert in self.experts.items():
            rows = (chosen == int(i)).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        return y

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        if flags.one:
            return x + self.run(x, chosen) * weight[:, None]
        order = (chosen * world // EXPERTS).argsort(stable=True)
        sent = torch.bincount(chosen * world // EXPERTS, minlength=world)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        sent, got = sent.tolist(), got.tolist()
        load = x[order] * weight[order, None] if flags.faulty else x[order]
        names = Exchange.apply(chosen[order].float()[:, None], sent, got)[:, 0].long()
        home = Exchange.apply(self.run(Exchange.apply(load, sent, got), names), got, sent)
        return x + home[order.argsort()] * weight[:, None]


torch.manual_seed(85)
net = nn.Sequential(nn.Linear(8, DIM), Moe(), nn.LayerNorm(DIM), Moe(), nn.Linear(DIM, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(x), (x[:, :3] * x[:, 3:6]).argmax(1)) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
        for n, p in net.named_parameters():
            if "experts" not in n:
                dist.all_reduce(p.grad)
    for p in net.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
