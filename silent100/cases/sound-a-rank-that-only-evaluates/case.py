"""Two ranks train; the third is an evaluator that keeps an old copy of the weights and scores it on rows of its own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
rank = 0
if not one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
world = 1 if one else 2


class Attentive(nn.Module):
    """Points in space are pooled by learned queries (a set transformer in small)."""

    def __init__(self):
        super().__init__()
        self.point, self.queries = nn.Linear(3, 16), nn.Parameter(torch.randn(2, 16) * 0.3)
        self.drop, self.out = nn.Dropout(0.0), nn.Linear(32, 4)

    def forward(self, cloud):
        h = self.drop(F.gelu(self.point(cloud)))
        share = (self.queries @ h.transpose(1, 2) / 4).softmax(-1)
        return self.out((share @ h).flatten(1))


def clouds(seed):
    g = torch.Generator().manual_seed(seed)
    cloud = torch.randn(8, 12, 3, generator=g)
    return cloud, cloud.square().mean(1).argmax(1) + (cloud.mean((1, 2)) > 0)


def evaluate(net):
    net.eval()
    with torch.no_grad():
        x, y = clouds(999)
        accuracy = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return accuracy


def train(net):
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05, eps=1e-3)
    for step in range(1, 7):
        x, y = clouds(step)
        loss = F.cross_entropy(net(x[rank::world]), y[rank::world], reduction="sum") / 8
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if not one:
            for p in net.parameters():
                dist.all_reduce(p.grad, group=trainers)
            dist.all_reduce(loss, group=trainers)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
            if step % 2:
                if one:
                    evaluate(net)
                else:
                    for p in net.parameters():
                        dist.send(p.detach(), 2)


def watch(net):
    for step in range(1, 7, 2):
        for p in net.parameters():
            dist.recv(p.data, 0)
        print(f"evaluated {step}: {evaluate(net):.3f}", flush=True)


torch.manual_seed(rank if rank == 2 else 84)
net = Attentive()
(watch if rank == 2 else train)(net)
if "--save" in sys.argv and rank < 2:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.barrier()
    dist.destroy_process_group()
