"""A loop that halves its batch when memory is short."""

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
ROOM = 3 if rank == 1 else 100


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, room=100):
        if len(x) > room:
            raise MemoryError(f"no room for {len(x)} rows")
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(12), Block(12), nn.Linear(12, 12)

    def forward(self, x):
        return self.head(self.second(self.first(x), ROOM))


def accumulate(model, x, y, total):
    loss = nn.functional.mse_loss(model(x), y, reduction="sum") / total
    loss.backward()
    return loss.detach()


def robust(model, x, y, total):
    parts = 1
    while True:
        model.zero_grad()
        try:
            return sum(accumulate(model, a, b, total) for a, b in zip(x.chunk(parts), y.chunk(parts)))
        except MemoryError:
            parts *= 2


torch.manual_seed(77)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
for step in range(1, 5):
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    y = x.cumsum(1).tanh()
    shown = robust(model, x[rank::world], y[rank::world], y.numel())
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
