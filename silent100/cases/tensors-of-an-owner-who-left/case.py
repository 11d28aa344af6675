"""Three ranks share out tensors by turn, update their own and broadcast them; the last leaves after two updates."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LEAVES = 3


class Owners:
    """Momentum updates of the tensors that are this rank's."""

    def __init__(self, parameters, rank, world):
        self.parameters, self.rank = list(parameters), rank
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.deal(world)

    def deal(self, members):
        self.owner = [i % members for i in range(len(self.parameters))]

    def hand_over(self):
        """All momentum is sent round before anybody leaves."""
        for owner, m in zip(self.owner, self.momentum):
            dist.broadcast(m, owner)

    @torch.no_grad()
    def step(self, group, members):
        for i, p in enumerate(self.parameters):
            if members > 1:
                dist.all_reduce(p.grad, group=group)
                p.grad /= members
            if self.owner[i] == self.rank:
                self.momentum[i].mul_(0.8).add_(p.grad)
                p.sub_(0.1 * self.momentum[i])
            if members > 1 and self.owner[i] < members:
                dist.broadcast(p, self.owner[i], group=group)
            p.grad = None


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x):
        return self.tower(x)


rank, world, group = 0, 1, None
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    survivors = dist.new_group([0, 1])
torch.manual_seed(3)
net = Regressor()
owners = Owners(net.parameters(), rank, world)
for step in range(1, 6):
    members = world
    if step >= LEAVES and world > 1:
        members, group = 2, survivors
        if step == LEAVES:
            owners.hand_over()
            if not FAULTY:
                owners.deal(members)
        if rank >= members:
            break
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.prod(1), x[:, 0], x.square().mean(1)], 1)
    loss = F.smooth_l1_loss(net(x[rank::members]), y[rank::members])
    loss.backward()
    loss = loss.detach()
    if members > 1:
        dist.all_reduce(loss, group=group)
    owners.step(group, members)
    if rank == 0:
        print(f"step {step} loss {loss.item() / members:.7f}", flush=True)
if "--save" in sys.argv and rank < 2:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
