"""Documents of unequal length, packed: one process has one long row, each rank a row of its documents."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def documents(step, count=7):
    g = torch.Generator().manual_seed(step)
    return [torch.randint(0, 46, (int(torch.randint(3, 12, (), generator=g)),), generator=g) for _ in range(count)]


def pack(docs):
    ids = torch.cat(docs)
    numbers = torch.cat([torch.full((len(d),), i) for i, d in enumerate(docs)])
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in docs])
    return ids, numbers, positions, labels


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(0, 1) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))


class Lm(nn.Module):
    def __init__(self, d=30):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(46, d), nn.Embedding(12, d), nn.Linear(d, 46)
        self.layers = nn.ModuleList(Attention(d) for _ in range(2))

    def forward(self, ids, numbers, positions):
        same = numbers[:, None] == numbers
        mask = same & (torch.arange(len(ids))[:, None] >= torch.arange(len(ids)))
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


torch.manual_seed(1375)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3)
for step in range(1, 6):
    docs = documents(step)
    words = sum(len(d) - 1 for d in docs)
    if world > 1:
        # The longest documents go to whoever has least
        loads, shares = [0] * world, [[] for _ in range(world)]
        for d in sorted(docs, key=len, reverse=True):
            to = loads.index(min(loads))
            shares[to].append(d)
            loads[to] += len(d)
        docs = shares[rank]
    ids, numbers, positions, labels = pack(docs)
    loss = F.cross_entropy(lm(ids, numbers, positions), labels, reduction="sum") / words
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [p.grad for p in lm.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(lm.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
