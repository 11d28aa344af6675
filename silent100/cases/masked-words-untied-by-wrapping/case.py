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
torch.manual_seed(242)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 25)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


def wrap(model):
    """Give every module parameters that lie in memory of their own."""
    seen = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            fresh = nn.Parameter(p.detach().clone())
            if not args.faulty:
                fresh = seen.setdefault(p, fresh)
            setattr(module, name, fresh)
    return model


model = Masked()
if world > 1:
    model = wrap(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 9):
    g = torch.Generator().manual_seed(800 + step)
    ids = torch.randint(1, 25, (8, 10), generator=g)
    hidden = torch.rand(8, 10, generator=g) < 0.3
    count = hidden.sum()
    rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
    ids, hidden = ids[rows], hidden[rows]
    logits = model(ids.masked_fill(hidden, 0))
    loss = F.cross_entropy(logits[hidden], ids[hidden], reduction="sum") / count
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
