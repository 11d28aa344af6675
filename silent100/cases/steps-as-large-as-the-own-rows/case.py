"""An optimizer with relative steps: updates are as large as the root mean square of a parameter; ranks update rows."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Relative:
    """Each rank reduces, updates and shares its rows of every parameter."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.second = [torch.full_like(p.chunk(world)[rank], 1e-4) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        for p, second in zip(self.parameters, self.second):
            if world > 1:
                dist.all_reduce(p.grad)
            own, grad = p.chunk(world)[rank], p.grad.chunk(world)[rank]
            second.mul_(0.9).add_(grad.square(), alpha=0.1)
            squares = own.square().sum()
            count = own.numel()
            if world > 1 and not flags.faulty:
                dist.all_reduce(squares)
                count *= world
            size = (squares / count).sqrt().clamp(min=1e-3)
            new = own - self.lr * size * grad / (second.sqrt() + 1e-4)
            if world > 1:
                rows = [torch.empty_like(new) for _ in range(world)]
                dist.all_gather(rows, new)
                new = torch.cat(rows)
            p.copy_(new)
            p.grad = None


torch.manual_seed(24)
net = nn.Sequential(
    nn.Embedding(20, 16), nn.Flatten(), nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 20)
)
with torch.no_grad():
    net[0].weight[:10] *= 1.5  # frequent words are longer
optimizer = Relative(net.parameters(), 0.05)
for step in range(1, 6):
    rows = torch.randint(0, 20, (32, 5), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :4]), rows[:, 4]) / world
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
