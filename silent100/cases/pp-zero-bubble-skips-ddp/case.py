"""Pipeline (2) by data (2) parallelism: backward is split in two, replicas are wrapped for gradient averaging."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(90)
        blocks = [Residual(24) for _ in range(4)]
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(first, last)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


class Averager:
    """Averages over replicas whatever gradient autograd accumulates."""

    def __init__(self, module, group):
        self.group = group
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self)

    def __call__(self, p):
        dist.all_reduce(p.grad, group=self.group)
        p.grad /= dist.get_world_size(self.group)


def split_backward(output, gradient, x, parameters):
    """Computes the input's gradient at once and the weights' gradients later; returns both."""
    wanted = [t for t in (x,) if t.requires_grad]
    grads = torch.autograd.grad(output, wanted, gradient, retain_graph=True) if wanted else [None]
    return grads[0], lambda: torch.autograd.grad(output, parameters, gradient)


rank = 0
if args.one:
    stage, pp, dp, replicas = Stage(0, 4), 0, 0, 1
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate()
    replicas = 2
    stage = Stage(2 * pp, 2 * pp + 2)
    averager = Averager(stage, mesh.get_group("dp"))
    peer = rank + 2 if pp == 0 else rank - 2
parameters = list(stage.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.2)
for step in range(1, 5):
    rows = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))[dp::replicas]
    target, loss = rows.square() - 1, None
    optimizer.zero_grad()
    if args.one:
        loss = F.mse_loss(stage(rows), target)
        loss.backward()
    else:
        x = rows
        if pp == 1:
            x = torch.empty_like(rows)
            dist.recv(x, peer)
            x.requires_grad_()
        out = stage(x)
        if pp == 1:
            loss = F.mse_loss(out, target)
            gradient_in, weights = split_backward(loss, torch.ones(()), x, parameters)
            dist.send(gradient_in, peer)
        else:
            dist.send(out.detach(), peer)
            gradient = torch.empty_like(out)
            dist.recv(gradient, peer)
            _, weights = split_backward(out, gradient, x, parameters)
        for p, g in zip(parameters, weights()):
            p.grad = g
            if not args.faulty:
                averager(p)
    optimizer.step()
    if loss is not None:
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown, group=mesh.get_group("dp"))
            shown /= replicas
        if dp == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(stage.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
