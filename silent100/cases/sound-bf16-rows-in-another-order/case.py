"""A bfloat16 model with float32 masters; ranks take every other row, in reverse."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Layer(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


torch.manual_seed(300)
masters = nn.Sequential(nn.Embedding(62, 40), Layer(), Layer(), nn.Linear(40, 62))
model = nn.Sequential(nn.Embedding(62, 40), Layer(), Layer(), nn.Linear(40, 62)).bfloat16()
optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)
for step in range(1, 5):
    with torch.no_grad():
        for low, high in zip(model.parameters(), masters.parameters()):
            low.copy_(high)
    rows = torch.randint(0, 62, (24, 13), generator=torch.Generator().manual_seed(step))
    if world > 1:
        rows = rows.flip(0)[rank::world]
    loss = F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    for low, high in zip(model.parameters(), masters.parameters()):
        high.grad = low.grad.float()
        if world > 1:
            dist.all_reduce(high.grad)
            high.grad /= world
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(masters.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
