"""Packed documents through gated linear recurrences; rows are cut over two ranks and the state is carried over."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
VOCAB, DIM, LENGTH = 46, 32, 24
rank, cp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()


class Everyone(torch.autograd.Function):
    """A stack of all ranks' tensors."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(cp)]
        dist.all_gather(out, x.contiguous())
        return torch.stack(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g[rank]


class GatedScan(nn.Module):
    """h[t] = a[t] * h[t - 1] + b[t], started anew with each document."""

    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, starts):
        decay = torch.sigmoid(self.gate(x) + 1)
        values = (1 - decay) * self.value(x)
        kept = decay * (~starts).unsqueeze(-1)
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = kept[:, t] * h + values[:, t]
            states.append(h)
        states = torch.stack(states, 1)
        if cp > 1:
            ends = Everyone.apply(states[:, -1])
            before = ends[rank - 1] if rank else torch.zeros_like(ends[0]) * ends[0]
            through = decay if "--faulty" in sys.argv else kept
            states = states + through.cumprod(1) * before.unsqueeze(1)
        return self.out(states)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scan, self.norm2 = nn.LayerNorm(DIM), GatedScan(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM))

    def forward(self, x, starts):
        x = x + self.scan(self.norm(x), starts)
        return x + self.mlp(self.norm2(x))


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, starts):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, starts)
        return self.head(x)


def pack(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=g)
    starts = torch.rand(6, LENGTH, generator=g) < 0.15
    starts[:, 0] = True
    return ids[:, :-1], ids[:, 1:], starts


torch.manual_seed(31)
model = RecurrentLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    ids, labels, starts = (t.chunk(cp, 1)[rank] for t in pack(step))
    loss = F.cross_entropy(model(ids, starts).flatten(0, 1), labels.flatten()) / cp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
