"""Pictures and texts with a sigmoid loss; towers are cut over pairs of ranks, rows over the two pairs."""

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

DIM, ROWS = 16, 12
if flags.one:
    tensor, data, t, d, T, D = None, None, 0, 0, 1, 1
else:
    T = D = 2
    t, d = rank % T, rank // T
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor, data = pairs[d], across[t]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if T > 1:
            dist.all_reduce(g, group=tensor)
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if T > 1:
            dist.all_reduce(x, group=tensor)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.own = group, dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g.chunk(dist.get_world_size(ctx.group))[ctx.own], None


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 48, bias=False), nn.Linear(48, DIM, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(T, 0)[t].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(T, 1)[t].clone())

    def forward(self, x):
        return F.normalize(Leave.apply(self.down(F.gelu(self.up(Enter.apply(x))))), dim=-1)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(12), Tower(9)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, pictures, texts):
        a, b = self.image(pictures), self.text(texts)
        group, place = (dist.group.WORLD, rank) if flags.faulty else (data, d)
        every = b if flags.one else Gather.apply(b, group)
        signs = -torch.ones(len(a), len(every))
        signs[:, place * len(a) : place * len(a) + len(a)] += 2 * torch.eye(len(a))
        return -F.logsigmoid(signs * (a @ every.T * self.scale.exp() + self.bias)).sum() / ROWS


torch.manual_seed(6)
model = Pairs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    core = torch.randn(ROWS, 6, generator=g)
    pictures = torch.cat([core, torch.randn(ROWS, 6, generator=g)], 1).chunk(D)[d]
    texts = torch.cat([core.tanh(), torch.randn(ROWS, 3, generator=g)], 1).chunk(D)[d]
    loss = model(pictures, texts)
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if not flags.one:
        for tensor_ in [shown, *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor_, group=data)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
state = {}
for name, p in model.named_parameters():
    state[name] = (p.detach(), int("down" in name), t, T) if p.ndim else p.detach()
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
