"""DDP under bfloat16 autocast."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(50)
layer = nn.TransformerEncoderLayer(32, 4, 96, dropout=0.0, batch_first=True)
net = nn.Sequential(
    nn.Embedding(70, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 70)
)
model = net if args.one else DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(1, 5):
    rows = torch.randint(0, 70, (16, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows)
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows.roll(-1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model  # before its process group
    dist.destroy_process_group()
