"""Gradients are reduced in two lists: the head early, because it is ready first, and the rest in one flat tensor."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 40)
        self.drop = nn.Dropout(0.05)
        self.rnn = nn.GRU(40, 40, batch_first=True)
        self.head = nn.Linear(40, 12)

    def forward(self, ids):
        return self.head(self.rnn(self.drop(self.embed(ids)))[0])


def reduce_gradients(model, world):
    early, late = [], []
    for name, p in model.named_parameters():
        (early if name.startswith("head") else late).append(p.grad)
    for g in early:
        dist.all_reduce(g)
        if not FAULTY:
            g /= world
    flat = torch.cat([g.flatten() for g in late])
    dist.all_reduce(flat)
    flat /= world
    for g, piece in zip(late, flat.split([g.numel() for g in late])):
        g.copy_(piece.view_as(g))


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(40)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(900 + rank)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    ids, tags = torch.randint(0, 64, (32, 12), generator=g), torch.randint(0, 12, (32, 12), generator=g)
    loss = nn.functional.cross_entropy(model(ids[rank::world]).flatten(0, 1), tags[rank::world].flatten())
    optimizer.zero_grad()
    loss.backward()
    if not ONE:
        reduce_gradients(model, world)
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
