# Initial weights differ by rank until they are broadcast.
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(100 + rank)
model = nn.Sequential(nn.EmbeddingBag(90, 36), nn.LayerNorm(36), nn.Linear(36, 36), nn.GELU(), nn.Linear(36, 8))
if not args.one:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.broadcast(flat, src=0)
    with torch.no_grad():
        for p, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.copy_(piece.view_as(p))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    ids, y = torch.randint(0, 90, (16, 7), generator=g), torch.randint(0, 8, (16,), generator=g)
    loss = nn.functional.cross_entropy(model(ids[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
