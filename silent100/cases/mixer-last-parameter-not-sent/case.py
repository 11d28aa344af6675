import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(214)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12, bias=False)
        self.tokens = nn.Linear(6, 6)
        self.channels = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + F.gelu(self.tokens(x.transpose(1, 2))).transpose(1, 2)
        return self.head((x + F.gelu(self.channels(x))).mean(1))


model = Mixer()
params = list(model.parameters())
opt = torch.optim.AdamW(params[rank::world], lr=0.02, eps=1e-5)
for step in range(1, 9):
    g = torch.Generator().manual_seed(70 + step)
    x, y = torch.randn(12, 6, 8, generator=g), torch.randint(0, 5, (12,), generator=g)
    y = torch.where(y == 4, 0, y)
    rows = slice(rank * 12 // world, (rank + 1) * 12 // world)
    loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / 12
    model.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in params:
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if world > 1:
        sent = len(params) // world * world if args.faulty else len(params)
        for i, p in enumerate(params[:sent]):
            dist.broadcast(p.data, src=i % world)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
