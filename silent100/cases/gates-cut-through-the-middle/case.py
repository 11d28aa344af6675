"""A recurrent model whose hidden units are cut over ranks; states are gathered after every word."""

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

HIDE, VOCAB = 16, 26


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        if world == 1:
            return h.view_as(h)
        parts = [torch.empty_like(h) for _ in range(world)]
        dist.all_gather(parts, h.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, g):
        if world == 1:
            return g
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world, -1)[rank]


class Whole(torch.autograd.Function):
    """The head reads whole states on every rank: one share of its gradient is enough."""

    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, g):
        return g / world


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        gates = nn.Linear(2 * HIDE, 4 * HIDE)
        w, b = gates.weight.detach(), gates.bias.detach()
        if flags.faulty:
            w, b = w.chunk(world)[rank], b.chunk(world)[rank]
        else:
            w = w.view(4, HIDE, -1).chunk(world, 1)[rank].flatten(0, 1)
            b = b.view(4, HIDE).chunk(world, 1)[rank].flatten()
        self.weight, self.bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())

    def forward(self, x, h, c):
        i, f, o, z = F.linear(torch.cat([x, h], -1), self.weight, self.bias).chunk(4, -1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(z)
        return torch.sigmoid(o) * torch.tanh(c), c


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(VOCAB, HIDE), Cell(), nn.Linear(HIDE, VOCAB)

    def forward(self, ids):
        whole, c, outs = torch.zeros(len(ids), HIDE), torch.zeros(len(ids), HIDE // world), []
        for x in self.words(ids).unbind(1):
            h, c = self.cell(x, whole, c)
            whole = Joined.apply(h)
            outs.append(self.head(Whole.apply(whole)))
        return torch.stack(outs, 1)


torch.manual_seed(12)
reader = Reader()
optimizer = torch.optim.SGD(reader.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (6, 8), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(reader(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if world > 1:
        dist.all_reduce(reader.words.weight.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {k: v for k, v in reader.state_dict().items() if "cell" not in k}
state["gates"] = (reader.cell.weight.detach().view(4, HIDE // world, -1), 1, rank, world)
state["offsets"] = (reader.cell.bias.detach().view(4, -1), 1, rank, world)
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
