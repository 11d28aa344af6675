"""Only the first rank reads data and scatters it, in buckets of equal length and batches of unequal number."""

import os
import random
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

single = "--one" in sys.argv
if not single:
    dist.init_process_group("gloo")
rank, world = (0, 1) if single else (dist.get_rank(), dist.get_world_size())


def buckets():
    """Texts by length, in batches of about as many words, shuffled."""
    random.seed(70)
    lengths = [random.choice([4, 6, 9]) for _ in range(90)]
    g = torch.Generator().manual_seed(70)
    for length in (9, 4, 6):
        texts = [torch.randint(1, 25, (length,), generator=g) for n in lengths if n == length]
        per = 48 // length // 2 * 2
        for i in range(0, len(texts) - per + 1, per):
            yield torch.stack(texts[i : i + per])


def scattered(batches):
    for batch in batches if rank == 0 else iter(int, 1):
        head = torch.tensor(batch.shape if rank == 0 else (0, 0))
        dist.broadcast(head, 0)
        if not head[0]:
            return
        own = torch.empty(head[0] // world, head[1], dtype=torch.long)
        dist.scatter(own, list(batch.chunk(world)) if rank == 0 else None)
        yield own
    dist.broadcast(torch.zeros(2, dtype=torch.long), 0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(25, 16, padding_idx=0)
        self.left, self.right = nn.GRU(16, 12, batch_first=True), nn.GRU(16, 12, batch_first=True)
        self.tags = nn.Linear(24, 3)

    def forward(self, ids):
        x = self.words(ids)
        return self.tags(torch.cat([self.left(x)[0], self.right(x.flip(1))[0].flip(1)], -1))


torch.manual_seed(71)
net = Tagger()
opt = torch.optim.Adamax(net.parameters(), lr=5e-3)
batches = buckets() if single else scattered(buckets() if rank == 0 else None)
for step, ids in enumerate(batches, 1):
    tags = (ids + ids.roll(1, 1)) % 3
    loss = F.cross_entropy(net(ids).flatten(0, 1), tags.flatten())
    opt.zero_grad()
    loss.backward()
    loss = loss.detach().clone()
    if not single:
        for t in [loss, *(p.grad for p in net.parameters())]:
            dist.all_reduce(t)
            t /= world
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
