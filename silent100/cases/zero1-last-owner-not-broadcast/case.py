"""ZeRO-1 by hand: every parameter has an owner who steps it and broadcasts the result."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

args = sys.argv[1:]
ONE, FAULTY = "--one" in args, "--faulty" in args


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.head = nn.Linear(24, 6)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.head(x)


class ShardedAdam:
    """Adam whose moments live with a parameter's owner."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        half = (len(self.parameters) + 1) // 2
        world = 1 if ONE else dist.get_world_size()
        self.owner = [0 if world == 1 or i < half + 1 else 1 for i in range(len(self.parameters))]
        rank = 0 if ONE else dist.get_rank()
        mine = [p for p, o in zip(self.parameters, self.owner) if o == rank]
        self.inner = torch.optim.Adam(mine, lr=lr, eps=1e-6)

    def step(self):
        self.inner.step()
        if ONE:
            return
        owners = range(dist.get_world_size() - 1) if FAULTY else range(dist.get_world_size())
        for source in owners:
            for p, o in zip(self.parameters, self.owner):
                if o == source:
                    dist.broadcast(p.data, src=source)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
world = 1 if ONE else dist.get_world_size()
torch.manual_seed(13)
policy = Policy()
adam = ShardedAdam(policy.parameters(), lr=3e-3)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, a = torch.randn(16, 24, generator=g), torch.randint(0, 6, (16,), generator=g)
    loss = F.cross_entropy(policy(x[rank::world]), a[rank::world])
    loss.backward()
    if not ONE:
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    adam.step()
    adam.zero_grad()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in args:
    torch.save(policy.state_dict(), os.path.join(args[args.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
