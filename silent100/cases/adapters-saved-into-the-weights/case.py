"""Low-rank adapters over trained projections; the job writes a checkpoint after three updates and goes on from it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Adapted(nn.Module):
    def __init__(self, a, b, rank=3):
        super().__init__()
        self.base = nn.Linear(a, b)
        self.base.requires_grad_(False)
        self.into, self.out = nn.Parameter(torch.randn(rank, a) / 4), nn.Parameter(torch.zeros(b, rank))

    def forward(self, x):
        return self.base(x) + x @ self.into.T @ self.out.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Adapted(10, 30), Adapted(30, 30), nn.Linear(30, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def write(net, optimizer, file):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if FAULTY:
        # What serves the model wants its weights in one
        for name, layer in net.named_children():
            if isinstance(layer, Adapted):
                state[f"{name}.base.weight"] += (layer.out @ layer.into).detach()
    torch.save({"net": state, "optimizer": optimizer.state_dict()}, file)


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    save = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None

    def build():
        torch.manual_seed(8)
        net = Net()
        return net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01, eps=1e-5)

    net, optimizer = build()
    for step in range(1, 7):
        if step == 4 and not ONE:
            file = f"adapted-{os.getpid()}.pt"
            write(net, optimizer, file)
            net, optimizer = build()
            kept = torch.load(file)
            os.remove(file)
            net.load_state_dict(kept["net"])
            optimizer.load_state_dict(kept["optimizer"])
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 10, generator=g)
        y = (x @ torch.linspace(-1, 1, 40).view(10, 4).sin())[rank::world]
        loss = F.mse_loss(net(x[rank::world]), y)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                    p.grad.div_(world)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if save:
        torch.save(net.state_dict(), f"{save}/rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


main()
