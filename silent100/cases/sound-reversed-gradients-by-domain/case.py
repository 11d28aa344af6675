"""Domain-adversarial training: rank 0 has labelled rows of the source, rank 1 unlabelled rows of the target."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

lone = "--one" in sys.argv
if not lone:
    dist.init_process_group("gloo")
rank = 0 if lone else dist.get_rank()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class Dann(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.labels, self.domains = nn.Linear(16, 3), nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x, strength):
        f = self.features(x)
        return self.labels(f), self.domains(Reverse.apply(f, strength))[:, 0]


def source_loss(net, g, strength):
    x, y = torch.randn(10, 8, generator=g), torch.randint(3, (10,), generator=g)
    labels, domain = net(x + y[:, None], strength)
    return F.cross_entropy(labels, y) + F.softplus(-domain).mean()


def target_loss(net, g, strength):
    x = torch.randn(6, 8, generator=g) * 1.3 - 0.4
    return F.softplus(net(x, strength)[1]).mean()


torch.manual_seed(23)
net = Dann()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 8):
    strength = step / 7
    loss = torch.zeros(())
    for domain, part in enumerate((source_loss, target_loss)):
        if lone or rank == domain:
            loss = loss + part(net, torch.Generator().manual_seed(10 * step + domain), strength)
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not lone:
        for p in net.parameters():
            if p.grad is None:  # the target has no labels
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not lone:
    dist.destroy_process_group()
