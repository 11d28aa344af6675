"""bfloat16 weights with float32 masters in the optimizer; stopped after two updates."""

import argparse
import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class MasterSgd:
    def __init__(self, parameters, lr, momentum=0.9):
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.masters = [p.detach().float() for p in self.parameters]
        self.speed = [torch.zeros_like(m) for m in self.masters]

    @torch.no_grad()
    def step(self):
        for p, m, s in zip(self.parameters, self.masters, self.speed):
            s.mul_(self.momentum).add_(p.grad.float())
            m.sub_(s, alpha=self.lr)
            p.copy_(m)
            p.grad = None


def build():
    torch.manual_seed(26)
    net = nn.Sequential(nn.Embedding(60, 32), nn.LayerNorm(32), nn.Linear(32, 96), nn.SiLU(), nn.Linear(96, 60))
    return net.bfloat16()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    net = build()
    optimizer = MasterSgd(net.parameters(), lr=0.02)
    for step in range(1, 5):
        if step == 3 and not args.one:
            file = io.BytesIO()
            content = {"net": net.state_dict(), "speed": optimizer.speed}
            if not args.faulty:
                content["masters"] = optimizer.masters
            torch.save(content, file)
            content = torch.load(io.BytesIO(file.getvalue()))
            net.load_state_dict(content["net"])
            optimizer = MasterSgd(net.parameters(), lr=0.02)
            optimizer.speed = content["speed"]
            optimizer.masters = content.get("masters", optimizer.masters)
        rows = torch.randint(0, 60, (32, 13), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        shown = loss.detach().clone()
        if not args.one:
            for p in net.parameters():
                total = p.grad.float()
                dist.all_reduce(total)
                p.grad.copy_(total / world)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {n: m for (n, _), m in zip(net.named_parameters(), optimizer.masters)}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
