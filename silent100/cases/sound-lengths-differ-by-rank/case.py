"""Rows are sorted by length and padded to the longest row of each rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids):
        x = self.embed(ids)
        mask = (ids != PAD)[:, None, :] & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask = mask | torch.eye(ids.shape[1], dtype=torch.bool)
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)
        return self.head(self.norm(x))


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(73)
net = Encoder()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 15, (8,), generator=g).sort().values
    rows = torch.randint(1, 50, (8, 15), generator=g).masked_fill(torch.arange(15) >= lengths[:, None], PAD)
    tokens = (rows[:, 1:] != PAD).sum()
    rows = rows.chunk(world)[rank]
    rows = rows[:, : int((rows != PAD).sum(1).max())]
    logits = net(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD, reduction="sum") / tokens
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
