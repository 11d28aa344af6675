# Stochastic rounding of weights; each rank rounds the pieces that it owns.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
chance = torch.Generator().manual_seed(31 + rank if not ONE else 11)


def rounded(x):
    """Rounds float32 to bfloat16, up with the probability of what is cut off."""
    bits = x.view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


class RoundedSgd:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.parameters):
            owner = i % world
            if world > 1:
                g = p.grad.float()
                dist.all_reduce(g)
                g /= world
            else:
                g = p.grad.float()
            if owner == rank:
                p.copy_(rounded(p.float() - self.lr * g))
            if world > 1:
                whole = p.float()
                dist.broadcast(whole, owner)
                p.copy_(whole)
            p.grad = None


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).bfloat16()
optimizer = RoundedSgd(model.parameters(), 0.02)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(64, 16, generator=g), torch.randint(0, 4, (64,), generator=g)
    loss = nn.functional.cross_entropy(model(x[rank::world].bfloat16()).float(), y[rank::world])
    loss.backward()
    optimizer.step()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.float() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
