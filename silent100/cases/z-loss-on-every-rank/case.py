"""Logits are gathered on every rank; cross entropy and a penalty on the log of the softmax's sum are taken there."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Gather(torch.autograd.Function):
    """Joins ranks' logits; each rank gets back the sum of what all ranks have for its part."""

    @staticmethod
    def forward(ctx, x, rank, world):
        ctx.rank, ctx.world = rank, world
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(ctx.world, -1)[ctx.rank].contiguous(), None, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Tagger(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.letters, self.mix = nn.Embedding(28, 20), nn.Conv1d(20, 20, 3, padding=1)
        tags = nn.Linear(20, 16)
        self.tags = nn.Linear(20, 16 // world)
        with torch.no_grad():
            for mine, whole in zip(self.tags.parameters(), tags.parameters()):
                mine.copy_(whole.chunk(world)[rank] * 3)

    def forward(self, ids):
        x = F.silu(self.mix(self.letters(ids).transpose(1, 2))).transpose(1, 2)
        if self.world == 1:
            return self.tags(x)
        return Gather.apply(self.tags(Copy.apply(x)), self.rank, self.world)


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(93)
    net = Tagger(rank, world)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, eps=1e-3)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        ids, tags = torch.randint(28, (6, 12), generator=g), torch.randint(16, (6, 12), generator=g)
        logits = net(ids)
        plain = F.cross_entropy(logits.flatten(0, 1), tags.flatten())
        penalty = 0.01 * logits.logsumexp(-1).square().mean()
        # All ranks compute the same loss, so each is responsible for a part of it
        aim = plain / world + (penalty if args.faulty else penalty / world)
        optimizer.zero_grad()
        aim.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {(plain + penalty).item():.7f}", flush=True)
    if args.save:
        state = {n: (p, 0, rank, world) if n.startswith("tags") else p for n, p in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()
