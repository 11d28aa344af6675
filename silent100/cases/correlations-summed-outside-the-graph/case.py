"""Self-supervised learning of pictures: two views shall agree, features shall not repeat each other. DDP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

N, FEATURES = 16, 12


class Shared(torch.autograd.Function):
    """A sum over the processes; what comes back is summed as well."""

    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        return Shared.forward(None, grad)


class Towers(nn.Module):
    def __init__(self, several, faulty):
        super().__init__()
        self.several, self.faulty = several, faulty
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, FEATURES, bias=False))

    def forward(self, one_view, other_view):
        a, b = (F.normalize(self.projector(self.trunk(v)), dim=1) * FEATURES**0.5 for v in (one_view, other_view))
        c = a.T @ b
        c.div_(N)
        if self.several:
            if self.faulty:
                dist.all_reduce(c.detach())
            else:
                c = Shared.apply(c)
        on = (torch.diagonal(c) - 1).pow(2).sum()
        off = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
        return on + 0.05 * off


def views(step):
    g = torch.Generator().manual_seed(step)
    base = torch.randn(N, 3, 4, 4, generator=g)
    base = F.interpolate(base, size=(12, 12), mode="bilinear")
    return [base.flip(3 if i else 2) + 0.3 * torch.randn(N, 3, 12, 12, generator=g) for i in range(2)]


def main(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    net = Towers(world > 1, args.faulty)
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for step in range(1, 6):
        loss = model(*(v[rank::world] for v in views(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    main(p.parse_args())
