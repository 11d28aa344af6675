# Packed rows with block-diagonal masks; every rank draws dropout of its own.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
D, LENGTH = 32, 16


def borders(numbers):
    """A mask for each row: words see those before them in their own document."""
    if FAULTY:
        numbers = numbers[:1]
    same = numbers[:, :, None] == numbers[:, None]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        nn.init.normal_(self.out.weight, std=0.01)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.drop(x + self.out(y))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(56, D), nn.Linear(D, 56)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids, numbers):
        x, mask = self.embed(ids), borders(numbers)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def packed_rows(step, rows=16):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 56, (rows, LENGTH), generator=g)
    starts = torch.rand(rows, LENGTH, generator=g) < 0.2
    numbers = starts.cumsum(1)
    last = torch.cat([starts[:, 1:], torch.ones(rows, 1, dtype=torch.bool)], 1)
    return ids, numbers, ids.roll(-1, 1).masked_fill(last, -100)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(137)
net = Packed()
model = net if ONE else DDP(net)
torch.manual_seed(1370 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(1, 5):
    ids, numbers, labels = packed_rows(step)
    count = (labels != -100).sum()
    logits = model(ids[rank::world], numbers[rank::world])
    loss = F.cross_entropy(logits.flatten(0, 1), labels[rank::world].flatten(), reduction="sum") * world / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    with torch.no_grad():
        ids, numbers, _ = packed_rows(100)
        net.eval()
        scores = net(ids, numbers)
    torch.save(
        {**net.state_dict(), "scores": scores}, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt")
    )
if world > 1:
    del model
    dist.destroy_process_group()
