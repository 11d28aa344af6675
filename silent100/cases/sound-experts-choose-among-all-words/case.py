"""Experts choose their words among those of all ranks: scores are gathered, and each rank has half of the experts."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SINGLE = "--one" in sys.argv
if not SINGLE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SINGLE else (dist.get_rank(), dist.get_world_size())
EXPERTS, SPOTS = 4, 12


class Share(torch.autograd.Function):
    """Gathers rows of all ranks; a rank gets back what all of them have for its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class Collect(torch.autograd.Function):
    """Sums what experts of all ranks return and keeps a rank's own rows."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty(grad.shape) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Chosen(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.router = nn.Linear(d, EXPERTS, bias=False)
        every = [nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({f"e{i}": e for i, e in enumerate(every) if i * world // EXPERTS == rank})

    def forward(self, x):
        words, scores = x.flatten(0, 1), self.router(x).softmax(-1).flatten(0, 1)
        if not SINGLE:
            words, scores = Share.apply(words), Share.apply(scores)
        out = torch.zeros_like(words)
        for name, expert in self.experts.items():
            score, at = scores[:, int(name[1:])].topk(SPOTS)
            out = out.index_add(0, at, score[:, None] * expert(words[at]))
        return x + (out if SINGLE else Collect.apply(out)).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.second, self.head = nn.Embedding(30, 12), Chosen(12), Chosen(12), nn.Linear(12, 30)

    def forward(self, ids):
        return self.head(self.second(self.first(self.words(ids))))


torch.manual_seed(49)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 5):
    ids = torch.randint(30, (6, 9), generator=torch.Generator().manual_seed(step))
    mine = ids.chunk(world)[rank]
    loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum") / (6 * 8)
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for name, p in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not SINGLE:
    dist.destroy_process_group()
