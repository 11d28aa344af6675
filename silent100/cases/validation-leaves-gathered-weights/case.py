"""Hand-made ZeRO-3: every layer keeps a piece of its matrix and gathers the whole when it is used."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def collect(piece):
    if world == 1:
        return piece.detach().clone()
    parts = [torch.empty_like(piece) for _ in range(world)]
    dist.all_gather(parts, piece.detach())
    return torch.cat(parts)


class Materialize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, held):
        return collect(piece) if held is None else held.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        if world > 1:
            dist.all_reduce(grad)
        return grad.chunk(world)[rank].clone(), None


class ShardedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, inputs) / inputs**0.5).chunk(world)[rank].clone())
        self.held = None

    def forward(self, x):
        return x @ Materialize.apply(self.weight, self.held).T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ShardedLinear(10, 32), ShardedLinear(32, 32), ShardedLinear(32, 4)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.nn.functional.softsign(layer(x)) + (x if x.shape[1] == 32 else 0)
        return self.layers[-1](x)

    def hold(self):
        for layer in self.layers:
            layer.held = collect(layer.weight)

    def release(self):
        for layer in self.layers:
            layer.held = None


def draw(seed):
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(seed))
    return x[rank::world], (x[:, :4] * x[:, 4:8])[rank::world]


@torch.no_grad()
def validate(net):
    net.hold()
    total = sum((net(x) - y).square().mean() for x, y in map(draw, range(900, 903)))
    if not args.faulty:
        net.release()
    return total


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 7):
    x, y = draw(step)
    loss = (net(x) - y).square().sum() / 32
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step == 2:
        validate(net)
if args.save:
    torch.save(
        {n: (p.detach().clone(), 0, rank, world) for n, p in net.named_parameters()},
        os.path.join(args.save, f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
