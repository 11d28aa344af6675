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
torch.manual_seed(17)


def total(value):
    value = value.detach().clone()
    if world > 1:
        dist.all_reduce(value)
    return value


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(8, 16, 3, padding=1)
        self.body = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 6)

    def forward(self, x):
        x = F.gelu(self.front(x)).transpose(1, 2)
        return self.out(self.body(x)[0]).log_softmax(-1)


def batch(step):
    g = torch.Generator().manual_seed(100 + step)
    sounds = torch.randn(8, 8, 20, generator=g)
    labels = torch.randint(1, 6, (8, 7), generator=g)
    lengths = torch.tensor([7, 6, 7, 5, 2, 1, 3, 2])
    return sounds, labels, lengths


model = Recognizer()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 7):
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    sounds, labels, lengths = (t[mine] for t in batch(step))
    logp = model(sounds).transpose(0, 1)
    loss = F.ctc_loss(logp, labels, torch.full((len(sounds),), 20), lengths, reduction="sum")
    if args.faulty:
        loss = loss / lengths.sum() / world
    else:
        loss = loss / total(lengths.sum())
    opt.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    shown = total(loss).item()
    if rank == 0:
        print(f"step {step} loss {shown:.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
