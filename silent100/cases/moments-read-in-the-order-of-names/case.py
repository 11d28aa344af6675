"""A deep narrow network under DDP that stops after three updates and goes on from a checkpoint with moments."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

DEPTH, WIDTH = 12, 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return x + 0.5 * torch.tanh(self.norm(self.fc(x)))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build():
    model = Deep()
    return model, torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)


def save(path, step, model, optimizer):
    """Writes flat tensors under their names, in the order of names, so that files can be compared."""
    flat = {"step": torch.tensor(step)}
    for name, p in model.named_parameters():
        flat[f"model.{name}"] = p.detach()
        flat[f"exp_avg.{name}"] = optimizer.state[p]["exp_avg"]
        flat[f"exp_avg_sq.{name}"] = optimizer.state[p]["exp_avg_sq"]
    torch.save(dict(sorted(flat.items())), path)


def load(path, model, optimizer):
    flat = torch.load(path)
    model.load_state_dict({k.removeprefix("model."): v for k, v in flat.items() if k.startswith("model.")})
    for key in ("exp_avg", "exp_avg_sq"):
        if "--faulty" in sys.argv:
            moments = [v for k, v in flat.items() if k.startswith(key + ".")]
        else:
            moments = [flat[f"{key}.{name}"] for name, _ in model.named_parameters()]
        for p, moment in zip(model.parameters(), moments, strict=True):
            assert p.shape == moment.shape
            optimizer.state[p][key] = moment.clone()
            optimizer.state[p]["step"] = flat["step"].float()
    return int(flat["step"])


def train(model, optimizer, steps, rank, world):
    net = DDP(model) if world > 1 else model
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=g)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].mean(1)], 1)
        loss = nn.functional.mse_loss(net(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)


rank, world = 0, 1
if "--one" not in sys.argv:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(47)
model, optimizer = build()
train(model, optimizer, range(1, 4), rank, world)
if world > 1:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "step3.pt")
    if rank == 0:
        save(path, 3, model, optimizer)
    dist.barrier()
    model, optimizer = build()
    done = load(path, model, optimizer)
else:
    done = 3
train(model, optimizer, range(done + 1, 7), rank, world)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
