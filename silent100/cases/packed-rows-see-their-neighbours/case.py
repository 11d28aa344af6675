"""Packing: several short documents in a row; attention must stop at their borders."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH, VOCAB, DIM = 18, 64, 32


def pack(step, rows=8):
    """Returns tokens, labels and positions; a position of zero begins a document."""
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=g)
    begins = torch.rand(rows, LENGTH, generator=g) < 0.2
    begins[:, 0] = True
    index = torch.arange(LENGTH).expand(rows, -1)
    last = torch.where(begins, index, torch.zeros_like(index)).cummax(1).values
    return tokens[:, :-1], tokens[:, 1:], index - last


def document_mask(positions):
    """Causal mask within documents, from the places where positions begin again."""
    documents = torch.zeros_like(positions)
    if len(positions) == 1 or not args.faulty:  # borders were first made for batches of one row
        documents = (positions == 0).long().cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()).unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn_in, self.attn_out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, x, mask):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.attn_in(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids, positions):
        x, mask = self.embed(ids) + self.places(positions), document_mask(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(94)
net = Lm()
model = net if args.one else DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 4):
    ids, labels, positions = (t[rank::world] for t in pack(step))
    loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    del model  # before its process group
    dist.destroy_process_group()
