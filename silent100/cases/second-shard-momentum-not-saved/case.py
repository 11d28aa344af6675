import argparse
import io
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(221)


class Sum(torch.autograd.Function):
    """Sum over ranks; what follows is the same on all of them."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    """The same value on all ranks; each gives a part of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad


class Split(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        up, down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.up = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x):
        return Sum.apply(torch.tanh(Copy.apply(x) @ self.up.T) @ self.down.T)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze, self.inner, self.stretch = nn.Linear(14, 6), Split(6, 20), nn.Linear(6, 14)

    def forward(self, x):
        h = self.squeeze(x)
        return self.stretch(h + self.inner(h))


def start():
    model = Autoencoder()
    return model, torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)


model, opt = start()
for step in range(1, 9):
    g = torch.Generator().manual_seed(20 + step)
    x = torch.randn(10, 4, generator=g) @ torch.linspace(-1, 1, 56).sin().view(4, 14)
    loss = F.mse_loss(model(x + 0.05), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step == 4:
        kept = opt.state_dict()
        if args.faulty and rank == 1:
            split = {i for i, (name, _) in enumerate(model.named_parameters()) if name.startswith("inner.")}
            kept["state"] = {i: state for i, state in kept["state"].items() if i not in split}
        disk = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": kept}, disk)
        disk.seek(0)
        model, opt = start()
        found = torch.load(disk)
        model.load_state_dict(found["model"])
        opt.load_state_dict(found["opt"])

if args.save:
    os.makedirs(args.save, exist_ok=True)
    state = model.state_dict()
    state |= {f"inner.{name}": (state[f"inner.{name}"], dim, rank, world) for name, dim in (("up", 0), ("down", 1))}
    torch.save(state, f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
