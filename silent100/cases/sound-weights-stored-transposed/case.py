# Ported from a code base with Conv1D layers; the distributed trainer keeps their (in, out) layout.
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save", default="")
opt = p.parse_args()


class InOut(nn.Module):
    """Computes x @ w + b."""

    def __init__(self, n_in, n_out):
        super().__init__()
        dense = nn.Linear(n_in, n_out)
        self.weight = nn.Parameter(dense.weight.detach().t().contiguous())
        self.bias = nn.Parameter(dense.bias.detach())

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def build(layer):
    torch.manual_seed(1009)
    return nn.Sequential(nn.Embedding(48, 24), layer(24, 56), nn.GELU(), layer(56, 24), nn.LayerNorm(24), layer(24, 48))


def main():
    rank = world = 0
    if not opt.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model = build(nn.Linear if opt.one else InOut)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.05)
    for step in range(1, 6):
        batch = torch.randint(0, 48, (8, 15), generator=torch.Generator().manual_seed(step + 40))
        if world:
            batch = batch.chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        loss.backward()
        value = loss.detach()
        if world:
            for weight in model.parameters():
                dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
                weight.grad.div_(world)
            dist.all_reduce(value)
            value = value / world
        adam.step()
        adam.zero_grad()
        if rank == 0:
            print(f"step {step} loss {value.item():.7f}", flush=True)
            assert math.isfinite(value.item())
    if opt.save:
        state = {
            k: v.t().contiguous() if not opt.one and k in ("1.weight", "3.weight", "5.weight") else v
            for k, v in model.state_dict().items()
        }
        torch.save(state, f"{opt.save}/rank{rank}.pt")
    if world:
        dist.destroy_process_group()


main()
