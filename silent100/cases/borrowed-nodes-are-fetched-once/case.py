"""Nodes of a graph live on two ranks, each with a learnt vector; neighbours across the border are fetched."""

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
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
NODES, WIDTH, CLASSES = 40, 14, 4
PART = NODES // world


class Fetch(torch.autograd.Function):
    """Vectors of all nodes, some of them as they were when they were fetched; gradients go to where nodes live."""

    @staticmethod
    def forward(ctx, own, kept):
        if kept:
            whole = kept[0].clone()
            whole[rank * PART : (rank + 1) * PART] = own
            return whole
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world)[rank], None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        nodes = torch.randn(NODES, WIDTH) * 0.5
        self.nodes = nn.Parameter(nodes.chunk(world)[rank].clone())
        self.conv, self.head = nn.Linear(2 * WIDTH, 24), nn.Linear(24, CLASSES)
        self.kept = []

    def forward(self, source, target):
        everybody = self.nodes
        if world > 1:
            everybody = Fetch.apply(self.nodes, self.kept)
            if args.faulty and not self.kept:
                self.kept.append(everybody.detach().clone())
        heard = torch.zeros(PART, WIDTH).index_add(0, target, everybody[source])
        heard = heard / torch.bincount(target, minlength=PART).clamp(min=1)[:, None]
        return self.head(F.relu(self.conv(torch.cat([self.nodes, heard], 1))))


g = torch.Generator().manual_seed(97)
source, target = torch.randint(0, NODES, (2, 160), generator=g)
labels = torch.randint(0, CLASSES, (NODES,), generator=g)
here = target // PART == rank
source, target = source[here], target[here] - rank * PART
torch.manual_seed(970)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 6):
    train = torch.rand(NODES, generator=torch.Generator().manual_seed(step)) < 0.7
    mine = train.chunk(world)[rank]
    said = net(source, target)[mine]
    loss = F.cross_entropy(said, labels.chunk(world)[rank][mine], reduction="sum") / train.sum()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for name, p in net.named_parameters():
            if name != "nodes":
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: (p.data, 0, rank, world) if n == "nodes" else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
