"""Expert parallelism without all-to-all: all ranks see all words, compute their experts and sum what comes out."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, SIZE = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())


class Enter(torch.autograd.Function):
    """Nothing forward, a sum over ranks backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if SIZE > 1:
            dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if SIZE > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Moe(nn.Module):
    def __init__(self, d, hidden, experts=6, top=3):
        super().__init__()
        self.top, self.count = top, experts // SIZE
        self.first = RANK * self.count
        self.router = nn.Linear(d, experts, bias=False)
        w_in, w_out = torch.randn(experts, d, hidden) * 0.2, torch.randn(experts, hidden, d) * 0.15
        self.w_in = nn.Parameter(w_in.chunk(SIZE)[RANK].clone())
        self.w_out = nn.Parameter(w_out.chunk(SIZE)[RANK].clone())

    def forward(self, x):
        scores = self.router(x).sigmoid()
        best = scores.topk(self.top, -1).indices
        chosen = torch.zeros_like(scores).scatter(-1, best, 1.0) * scores
        if not args.faulty:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-6)
        own = Enter.apply(chosen)[:, self.first : self.first + self.count]
        if args.faulty:
            own = own / (own.sum(-1, keepdim=True) + 1e-6)
        h = F.silu(torch.einsum("nd,edh->neh", Enter.apply(x), self.w_in))
        y = torch.einsum("neh,ehd,ne->nd", h, self.w_out, own)
        return x + Leave.apply(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 20), nn.Linear(20, 48)
        self.mix = nn.GRU(20, 20, batch_first=True)
        self.moe1, self.moe2 = Moe(20, 24), Moe(20, 24)

    def forward(self, ids):
        x = self.embed(ids)
        x = (x + self.mix(x)[0]).flatten(0, 1)
        return self.head(self.moe2(self.moe1(x)))


torch.manual_seed(3131)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 48, (8, 9), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    cut = ("w_in", "w_out")
    state = {n: (p.data, 0, RANK, SIZE) if n.endswith(cut) else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
