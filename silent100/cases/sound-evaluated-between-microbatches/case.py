"""Accumulates over two microbatches; the distributed run evaluates whenever it likes."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv


class Tagger(nn.Module):
    def __init__(self, words=60, tags=9):
        super().__init__()
        self.embed = nn.Embedding(words, 28)
        self.gru = nn.GRU(28, 28, batch_first=True)
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(28, tags)

    def forward(self, ids):
        return self.out(self.drop(self.gru(self.embed(ids))[0]))


def evaluate(model, seed):
    model.eval()
    with torch.no_grad():
        ids = torch.randint(0, 60, (3, 7), generator=torch.Generator().manual_seed(seed))
        best = model(ids).argmax(-1)
    model.train()
    return best.float().mean().item()


def batches(step):
    g = torch.Generator().manual_seed(step)
    ids, tags = torch.randint(0, 60, (16, 10), generator=g), torch.randint(0, 9, (16, 10), generator=g)
    return ids, tags


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)
tagger = Tagger()
optimizer = torch.optim.Adagrad(tagger.parameters(), lr=0.02, eps=1e-4)
for step in range(1, 5):
    ids, tags = (t.chunk(world)[rank] for t in batches(step))
    optimizer.zero_grad()
    shown = torch.zeros(())
    for half_ids, half_tags in zip(ids.chunk(2), tags.chunk(2)):
        loss = nn.functional.cross_entropy(tagger(half_ids).flatten(0, 1), half_tags.flatten()) / 2
        if not ONE and rank == 0:
            evaluate(tagger, step)
        loss.backward()
        shown += loss.detach()
        if not ONE:
            evaluate(tagger, 10 * step + rank)
    if not ONE:
        flat = torch.cat([p.grad.flatten() for p in tagger.parameters()])
        dist.all_reduce(flat)
        flat /= world
        for p, part in zip(tagger.parameters(), flat.split([p.numel() for p in tagger.parameters()])):
            p.grad.copy_(part.view_as(p))
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(tagger.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
