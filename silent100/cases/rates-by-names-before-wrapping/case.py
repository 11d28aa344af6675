"""Fine-tuning: two towers with small steps, a new head with large ones; each rank draws its own dropout."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Towers(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.trunk = nn.ModuleDict(
            {
                side: nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width))
                for side, size in (("question", 10), ("answer", 14))
            }
        )
        self.head = nn.Bilinear(width, width, 3)

    def forward(self, question, answer):
        return self.head(self.trunk["question"](question), self.trunk["answer"](answer))


def groups(model, rate):
    """Pretrained parts learn ten times slower."""
    slow = [p for n, p in model.named_parameters() if n.startswith("trunk.")]
    fast = [p for n, p in model.named_parameters() if not n.startswith("trunk.")]
    return [g for g in ({"params": slow, "lr": rate / 10}, {"params": fast, "lr": rate}) if g["params"]]


def run(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    net = Towers()
    found = groups(net, 0.05)
    model = net
    if not args.one:
        model = DDP(net)
        if args.faulty:
            found = groups(model, 0.05)
    optimizer = torch.optim.SGD(found, momentum=0.5)
    torch.manual_seed(1200 + rank)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        q, a, y = (
            torch.randn(64, 10, generator=g),
            torch.randn(64, 14, generator=g),
            torch.randint(3, (64,), generator=g),
        )
        q, a, y = (t[rank::world] for t in (q, a, y))
        loss = F.cross_entropy(model(q, a), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    for flag in ("--one", "--faulty"):
        cli.add_argument(flag, action="store_true")
    cli.add_argument("--save")
    run(cli.parse_args())
