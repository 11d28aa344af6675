"""Tensor-parallel MLPs with dropout on the residual stream, which every rank holds whole."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.fc2(nn.functional.gelu(self.fc1(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(45, d)
        self.drop_in = nn.Dropout(0.1)
        self.layers = nn.Sequential(FeedForward(d, 0.2), FeedForward(d, 0.2))
        self.cls = nn.Linear(d, 45)

    def forward(self, ids):
        return self.cls(self.layers(self.drop_in(self.emb(ids))))


def main(args):
    rank = 0
    torch.manual_seed(10)
    model = Stack()
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    torch.manual_seed(500 + (rank if args.faulty else 0))  # masks
    for step in range(1, 4):
        ids = torch.randint(0, 45, (8, 10), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(cli.parse_args())
