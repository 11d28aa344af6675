"""FSDP2 with activation checkpointing; one process keeps activations."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d), nn.MultiheadAttention(d, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
torch.manual_seed(44)
net = Net()
names = [n for n, _ in net.named_parameters()]
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)
        fully_shard(net.blocks[i])
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 4):
    rows = torch.randint(0, 50, (8, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {n: p if args.one else p.full_tensor() for n, p in zip(names, net.parameters())}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
