"""AdamW over this rank's part of every flattened parameter; the model computes in bfloat16."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ShardedAdamW:
    def __init__(self, parameters, rank, world, lr, dtype):
        self.parameters, self.rank, self.world, self.lr, self.t = list(parameters), rank, world, lr, 0
        self.m = [torch.zeros(-(-p.numel() // world)) for p in self.parameters]
        self.v = [torch.zeros_like(m, dtype=dtype) for m in self.m]

    def own(self, tensor):
        tensor = tensor.flatten()
        size = -(-tensor.numel() // self.world)
        return F.pad(tensor, (0, size * self.world - tensor.numel())).chunk(self.world)[self.rank]

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p, m, v in zip(self.parameters, self.m, self.v):
            if self.world > 1:
                dist.all_reduce(p.grad)
                p.grad /= self.world
            g = self.own(p.grad)
            m.lerp_(g, 0.1)
            v.mul_(0.999).add_((g * g * 0.001).to(v.dtype))
            update = m / (1 - 0.9**self.t) / ((v.float() / (1 - 0.999**self.t)).sqrt() + 1e-5)
            new = self.own(p) * (1 - self.lr * 0.1) - self.lr * update
            parts = [new]
            if self.world > 1:
                parts = [torch.empty_like(new) for _ in range(self.world)]
                dist.all_gather(parts, new.contiguous())
            p.copy_(torch.cat(parts)[: p.numel()].view_as(p))
            p.grad = None

    def moments(self):
        return {f"v{i}": v.float() for i, v in enumerate(self.v)}


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
    torch.manual_seed(63)
    net = nn.Sequential(
        nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 64)
    )
    optimizer = ShardedAdamW(net.parameters(), rank, world, 1e-3, torch.bfloat16 if args.faulty else torch.float32)
    for step in range(1, 9):
        rows = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(step))[rank::world]
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {name: (v, 0, rank, world) for name, v in optimizer.moments().items()}
        torch.save({**net.state_dict(), **state}, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
