# Ratings: rows of a table belong to rank (row mod active); two ranks are active at first, then three.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
leave_sums = "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
ROWS, WIDTH = 20, 6


class Bring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if not one:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH) * 0.5)  # rows of others are not looked at
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def own(self, active):
        rows = torch.arange(ROWS)
        return (torch.ones(ROWS) if one else (rows % active == rank).float())[:, None]

    def forward(self, pairs, active):
        rows = Bring.apply((self.table * self.own(active))[pairs])
        return self.tower(rows.flatten(1))[:, 0]


def hand_over(tensor, mask):
    """Whole rows at all ranks, each from its owner."""
    whole = tensor * mask
    if not one:
        dist.all_reduce(whole)
    tensor.copy_(whole)


torch.manual_seed(77)
model = Ratings()
rows = torch.optim.Adagrad([model.table], lr=0.1, eps=1e-2)
rest = torch.optim.SGD(model.tower.parameters(), lr=0.05)
active = 2
for step in range(1, 8):
    if step == 4:
        with torch.no_grad():
            mask = model.own(active)
            hand_over(model.table, mask)
            if not leave_sums:
                hand_over(rows.state[model.table]["sum"], mask)
        active = 3
    g = torch.Generator().manual_seed(step)
    pairs = torch.randint(0, ROWS, (30, 2), generator=g)
    stars = (pairs[:, 0] * pairs[:, 1] % 7).float() / 3
    loss = nn.functional.mse_loss(model(pairs, active), stars)
    rows.zero_grad()
    rest.zero_grad()
    loss.backward()
    rows.step()
    rest.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    with torch.no_grad():
        hand_over(model.table, model.own(active))
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
