import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv


class Pooled(nn.Module):
    """Images of few grey values, so that pooling and the vote of branches meet equal numbers all the time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 8, 2)
        self.branches = nn.ModuleList(nn.Linear(8 * 9, 5) for _ in range(3))
        for branch in self.branches[1:]:
            branch.load_state_dict(self.branches[0].state_dict())

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.first(x)), 2)
        x = F.max_pool2d(torch.relu(self.second(x)), 2, stride=1).flatten(1)
        votes = torch.stack([branch(x) for branch in self.branches])
        return votes.max(0).values


def grey(step):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 3, (10, 1, 10, 10), generator=g) / 2, torch.randint(0, 5, (10,), generator=g)


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(27)
    net = Pooled()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, 6):
        x, y = (t[rank::world] for t in grey(step))
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
