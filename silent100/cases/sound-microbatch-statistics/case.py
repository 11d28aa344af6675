"""A routed model with a balancing loss of each microbatch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Routed(nn.Module):
    def __init__(self, dim=32, experts=4):
        super().__init__()
        self.embed, self.head, self.gate = nn.Embedding(64, dim), nn.Linear(dim, 64), nn.Linear(dim, experts)
        self.w = nn.Parameter(torch.randn(experts, dim, dim) * 0.2)

    def forward(self, ids):
        x = self.embed(ids.flatten())
        probs = self.gate(x).softmax(-1)
        top, chosen = probs.max(-1)
        share = F.one_hot(chosen, 4).float().mean(0)
        x = x + top[:, None] * torch.relu(torch.einsum("nd,ndf->nf", x, self.w[chosen]))
        return self.head(x), 0.1 * 4 * (share * probs.mean(0)).sum()


torch.manual_seed(502)
net = Routed()
model = net if args.one else DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(1, 5):
    rows = torch.randint(0, 64, (16, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    logits, balance = model(rows[:, :-1])
    loss = F.cross_entropy(logits, rows[:, 1:].flatten()) + balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model  # before its process group
    dist.destroy_process_group()
