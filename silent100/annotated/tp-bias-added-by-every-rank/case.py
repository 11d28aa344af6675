"""Column- and row-parallel linear layers of one's own, with biases."""

import argparse
import os

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import nn


def group_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def group_rank():
    return dist.get_rank() if dist.is_initialized() else 0


class _Same(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(outputs, *, x):
        spmd.assert_type(x, {"tp": spmd.I})
        spmd.assert_type(outputs, {"tp": spmd.R})

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if group_size() > 1:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(outputs, *, x):
        spmd.assert_type(x, {"tp": spmd.V})
        spmd.assert_type(outputs, {"tp": spmd.I})

    @staticmethod
    def forward(ctx, x):
        if group_size() > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnLinear(nn.Module):
    def __init__(self, full: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(full.weight.data.chunk(group_size())[group_rank()].clone())
        self.bias = nn.Parameter(full.bias.data.chunk(group_size())[group_rank()].clone())

    def forward(self, x):
        return nn.functional.linear(_Same.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, full: nn.Linear, bias_first: bool):
        super().__init__()
        self.weight = nn.Parameter(full.weight.data.chunk(group_size(), 1)[group_rank()].clone())
        self.bias = nn.Parameter(full.bias.data.clone())
        self.bias_first = bias_first

    def forward(self, x):
        if self.bias_first:
            return _Sum.apply(nn.functional.linear(x, self.weight, self.bias))
        return _Sum.apply(nn.functional.linear(x, self.weight)) + self.bias


class Autoencoder(nn.Module):
    def __init__(self, bias_first):
        super().__init__()
        self.mlps = nn.ModuleList()
        for _ in range(3):
            up, down = nn.Linear(24, 80), nn.Linear(80, 24)
            nn.init.normal_(down.bias, std=0.3)
            self.mlps.append(nn.ModuleDict({"up": ColumnLinear(up), "down": RowLinear(down, bias_first)}))

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp["down"](torch.tanh(mlp["up"](x)))
        return x


def checked_loss(model, x):
    if not dist.is_initialized():
        return nn.functional.mse_loss(model(x), x.flip(1))
    with spmd.set_current_mesh({"tp": spmd.MeshAxis.of(dist.group.WORLD)}), typecheck(local=True):
        spmd.assert_type(x, {"tp": spmd.I})
        for name, p in model.named_parameters():
            spmd.assert_type(p, {"tp": spmd.I if name.endswith("down.bias") else spmd.V})
        return nn.functional.mse_loss(model(x), x.flip(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    if not args.one:
        dist.init_process_group("gloo")
    torch.manual_seed(70)
    model = Autoencoder(args.faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, 4):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        loss = checked_loss(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if group_rank() == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:

        def piece(name, p):
            if ".up." in name:
                return p.data, 0, group_rank(), group_size()
            if name.endswith("down.weight"):
                return p.data, 1, group_rank(), group_size()
            return p.data

        state = {name: piece(name, p) for name, p in model.named_parameters()}
        torch.save(state, os.path.join(args.save, f"rank{group_rank()}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
