# Message passing by mean over neighbours; nodes are on all ranks, edges are dealt out.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE = "--one" in sys.argv
OWN = "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Graph:
    def __init__(self, nodes=40, edges=170, seed=3):
        g = torch.Generator().manual_seed(seed)
        pairs = torch.randint(0, nodes, (2, edges), generator=g)
        pairs = pairs[:, pairs[1].argsort(stable=True)]
        self.source, self.target = pairs.chunk(world, 1)[rank]
        degree = torch.bincount(self.target, minlength=nodes).float()
        if world > 1 and not OWN:
            dist.all_reduce(degree)
        self.degree = degree.clamp(min=1)[:, None]
        self.features = torch.randn(nodes, 9, generator=g)
        self.labels = torch.randint(0, 4, (nodes,), generator=g)


class Conv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.self_, self.neighbour = nn.Linear(a, b), nn.Linear(a, b, bias=False)

    def forward(self, x, graph):
        sent = Spread.apply(x)[graph.source]
        heard = Sum.apply(torch.zeros_like(x).index_add(0, graph.target, sent)) / graph.degree
        return self.self_(x) + self.neighbour(heard)


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.head = Conv(9, 24), Conv(24, 24), nn.Linear(24, 4)

    def forward(self, graph):
        x = F.elu(self.conv1(graph.features, graph))
        return self.head(x + F.elu(self.conv2(x, graph)))


torch.manual_seed(707)
net, graph = Sage(), Graph()
optimizer = torch.optim.RMSprop(net.parameters(), lr=3e-3, eps=1e-3)
for step in range(1, 6):
    train = torch.rand(40, generator=torch.Generator().manual_seed(step)) < 0.6
    loss = F.cross_entropy(net(graph)[train], graph.labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
