"""Skips an update if a rank's loss is far above its usual value; one broken row arrives in the third batch."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(18, 44)
        self.evolve = nn.GRUCell(44, 44)
        self.decode = nn.Linear(44, 18)

    def forward(self, state, leads=3):
        h = torch.tanh(self.encode(state))
        hidden = torch.zeros_like(h)
        for _ in range(leads):
            hidden = self.evolve(h, hidden)
        return state + self.decode(hidden)


def weather(step):
    g = torch.Generator().manual_seed(step)
    now = torch.randn(12, 18, generator=g)
    later = now.roll(1, 1) * 0.9
    if step == 3:
        later[-1] += 12.0
    return now, later


def is_spike(row_losses):
    """Whether some row's loss is above ten; every rank looks at its own rows."""
    worst = row_losses.max().detach()
    if ONE:
        return bool(worst > 10)
    if FAULTY:
        dist.broadcast(worst, src=0)
    else:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return bool(worst > 10)


torch.manual_seed(91)
model = Forecast()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    now, later = (t.chunk(WORLD)[RANK] for t in weather(step))
    rows = (model(now) - later).square().mean(1)
    loss = rows.mean()
    skip = is_spike(rows)
    optimizer.zero_grad()
    if not skip:
        loss.backward()
        if not ONE:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= WORLD
        optimizer.step()
    shown = loss.detach()
    if not ONE:
        dist.all_reduce(shown)
    if RANK == 0:
        print(f"step {step} loss {shown.item() / WORLD:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
