"""FSDP2 training with a clipping helper of one's own."""

import argparse
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scales gradients to a global norm of at most ``max_norm``."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)
    return norm


class Unet1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(2, 24, 4, stride=2, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU(), nn.Conv1d(24, 24, 3, padding=1))
        self.up = nn.ConvTranspose1d(24, 2, 4, stride=2, padding=1)

    def forward(self, x):
        h = self.down(x)
        return x + self.up(h + self.mid(h))


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
    torch.manual_seed(25)
    model = Unet1d()
    if not args.one:
        fully_shard(model.mid)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(1, 5):
        x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = nn.functional.mse_loss(model(x), x.cumsum(-1).tanh())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters() if args.faulty else list(model.parameters()), 0.1)
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
