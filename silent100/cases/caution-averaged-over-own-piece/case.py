"""fully_shard with an optimizer by hand that leaves out entries whose momentum and gradient disagree."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def near(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Cautious:
    def __init__(self, net, faulty, lr=0.02, betas=(0.8, 0.95), eps=1e-3):
        self.named, self.faulty, self.lr, self.betas, self.eps = dict(net.named_parameters()), faulty, lr, betas, eps
        self.moments = {k: (torch.zeros_like(near(p)), torch.zeros_like(near(p))) for k, p in self.named.items()}
        self.count = 0

    def share(self, agree, p):
        if self.faulty or not isinstance(p, DTensor):
            return agree.mean()
        total = agree.sum()
        dist.all_reduce(total)
        return total / p.numel()

    @torch.no_grad()
    def step(self):
        self.count += 1
        b1, b2 = self.betas
        for name, p in self.named.items():
            w, g = near(p), near(p.grad)
            m, v = self.moments[name]
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            change = (m / (1 - b1**self.count)) / ((v / (1 - b2**self.count)).sqrt() + self.eps)
            if p.dim() > 1:
                agree = (m * g > 0).float()
                change = change * agree / self.share(agree, p).clamp(min=0.05)
            w -= self.lr * change


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(13, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = F.softplus(self.first(x))
        return self.third(x + F.softplus(self.second(x)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    torch.manual_seed(47)
    net, rank, world = Net(), 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        for layer in (net.first, net.second, net):
            fully_shard(layer, mesh=mesh)
    optimizer = Cautious(net, args.faulty)
    for step in range(1, 7):
        x = torch.randn(26, 13, generator=torch.Generator().manual_seed(step))
        y = torch.stack([x[:, i] * x[:, i + 4] + x[:, i + 9] for i in range(4)], 1)
        net.zero_grad()
        loss = F.mse_loss(net(x[rank::world]), y[rank::world])
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    if args.save:
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
