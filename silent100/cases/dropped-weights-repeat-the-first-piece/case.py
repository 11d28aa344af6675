"""A weight-dropped LSTM language model; hidden units are cut over ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WORDS, WIDTH, UNITS, PIECES, DROP = 17, 8, 16, 2, 0.3
faulty = "--faulty" in sys.argv
rank, world = 0, 1
if "--one" not in sys.argv:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
MINE = range(PIECES) if world == 1 else [rank]


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        if world == 1:
            return h.clone()
        parts = [torch.empty_like(h) for _ in range(world)]
        dist.all_gather(parts, h.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g.chunk(world, -1)[rank]


class AddLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class DroppedLSTM(nn.Module):
    """Weights are (units, 4 gates, inputs); a rank has some of the units."""

    def __init__(self):
        super().__init__()
        inward, around = torch.randn(UNITS, 4, WIDTH) * 0.3, torch.randn(UNITS, 4, UNITS) * 0.25
        self.inward = nn.Parameter(inward.chunk(world)[rank].clone())
        self.around = nn.Parameter(around.chunk(world)[rank].clone())

    def forward(self, x, step):
        masks = []
        for piece in MINE:
            seed = 1000 * step + (0 if faulty else piece)
            g = torch.Generator().manual_seed(seed)
            masks.append(torch.rand(UNITS // PIECES, 4, UNITS, generator=g) > DROP)
        around = self.around * torch.cat(masks) / (1 - DROP)
        c = x.new_zeros(len(x), len(around))
        h, states = x.new_zeros(len(x), UNITS), []
        for t in range(x.shape[1]):
            z = torch.einsum("bi,ugi->bug", x[:, t], self.inward) + torch.einsum("bi,ugi->bug", h, around)
            i, f, o, n = z.unbind(-1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(n)
            own = torch.sigmoid(o) * torch.tanh(c)
            states.append(own)
            h = Collect.apply(own)
        return torch.stack(states, 1)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, WIDTH), DroppedLSTM()
        self.head = nn.Parameter((torch.randn(UNITS, WORDS) * 0.3).chunk(world)[rank].clone())

    def forward(self, ids, step):
        return AddLogits.apply(self.cell(self.embed(ids), step) @ self.head)


torch.manual_seed(10)
lm = LM()
optimizer = torch.optim.SGD(lm.parameters(), lr=1.0)
for step in range(1, 6):
    ids = torch.randint(0, 5, (4, 9), generator=torch.Generator().manual_seed(step)).cumsum(1) % WORDS
    loss = F.cross_entropy(lm(ids[:, :-1], step).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if world > 1:
        dist.all_reduce(lm.embed.weight.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: p.detach() if n.startswith("embed") else (p.detach(), 0, rank, world) for n, p in lm.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
