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
torch.manual_seed(207)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.season = nn.Linear(12, 16)
        self.mix = nn.Conv1d(1, 4, 5, padding=2)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        h = torch.tanh(self.season(x))
        return self.out(F.softplus(self.mix(h[:, None])).flatten(1))


model = Forecast()
params = list(model.parameters())
sizes = [p.numel() for p in params]
piece = -(-sum(sizes) // world)
flat = F.pad(torch.cat([p.detach().flatten() for p in params]), (0, piece * world - sum(sizes)))
shard = flat[rank * piece : (rank + 1) * piece].clone()
momentum = torch.zeros(piece)
kind = torch.bfloat16 if args.faulty else torch.float32
for step in range(1, 11):
    bucket = torch.zeros(piece * world, dtype=kind)
    shown = torch.zeros(())
    g = torch.Generator().manual_seed(step)
    series = torch.randn(16, 15, generator=g).cumsum(1) / 2
    for rows in range(rank * 16 // world, (rank + 1) * 16 // world, 2):
        part = series[rows : rows + 2]
        loss = F.smooth_l1_loss(model(part[:, :12]), part[:, 12:], reduction="sum") / 48
        grads = torch.autograd.grad(loss, params)
        bucket[: sum(sizes)] += torch.cat([v.flatten() for v in grads]).to(kind)
        shown += loss.detach()
    if world > 1:
        dist.all_reduce(bucket)
        dist.all_reduce(shown)
    momentum.mul_(0.9).add_(bucket[rank * piece : (rank + 1) * piece].float())
    shard -= 0.1 * momentum
    pieces = [torch.empty(piece) for _ in range(world)]
    if world > 1:
        dist.all_gather(pieces, shard)
    else:
        pieces = [shard]
    for p, v in zip(params, torch.cat(pieces)[: sum(sizes)].split(sizes)):
        p.data.copy_(v.view_as(p))
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
