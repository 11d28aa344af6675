"""Muon for matrices of an FSDP2 model, AdamW-free: vectors and tables take plain momentum steps."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.9, local=False):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "local": local})

    def direction(self, m, local):
        if not isinstance(m, DTensor):
            return newton_schulz(m)
        if local:
            return DTensor.from_local(
                newton_schulz(m.to_local()), m.device_mesh, m.placements, shape=m.shape, stride=m.stride()
            )
        return distribute_tensor(newton_schulz(m.full_tensor()), m.device_mesh, m.placements)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(group["momentum"]).add_(p.grad)
                p.add_(self.direction(state["m"], group["local"]), alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 40)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


def main(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    net = Net()
    if not args.one:
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    matrices = [layer.weight for layer in net.layers]
    others = [p for p in net.parameters() if not any(p is m for m in matrices)]
    muon = Muon(matrices, lr=0.02, local=args.faulty)
    sgd = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    for step in range(1, 4):
        rows = torch.randint(0, 40, (8, 11), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        muon.step()
        sgd.step()
        muon.zero_grad()
        sgd.zero_grad()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(cli.parse_args())
