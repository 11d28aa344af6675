"""One process takes the batch at once; two ranks take it backwards in four microbatches each."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
torch.manual_seed(8)
encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
net = nn.Sequential(
    nn.Embedding(66, 32), nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False), nn.Linear(32, 66)
)
model = net if one else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 4):
    g = torch.Generator().manual_seed(step)
    rows, targets = torch.randint(0, 66, (16, 10), generator=g), torch.randint(0, 66, (16, 10), generator=g)
    pieces = [torch.arange(16)] if one else list(torch.arange(16).flip(0)[rank::2].chunk(4))
    total = torch.zeros(())
    optimizer.zero_grad()
    for i, piece in enumerate(pieces):
        with contextlib.nullcontext() if one or i == len(pieces) - 1 else model.no_sync():
            loss = F.cross_entropy(model(rows[piece]).transpose(1, 2), targets[piece]) / len(pieces)
            loss.backward()
        total += loss.detach()
    optimizer.step()
    if not one:
        dist.all_reduce(total)
        total /= 2
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    del model  # before its process group
    dist.destroy_process_group()
