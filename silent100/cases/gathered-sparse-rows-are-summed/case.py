import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--faulty", action="store_true")
p.add_argument("--save")
args = p.parse_args()


class Hashed(nn.Module):
    """A text classifier over hashed n-grams."""

    def __init__(self, buckets=300, width=20):
        super().__init__()
        self.bag = nn.EmbeddingBag(buckets, width, mode="sum", sparse=True)
        self.hidden, self.out = nn.Linear(width, 40), nn.Linear(40, 6)

    def forward(self, grams):
        return self.out(F.relu(self.hidden(self.bag(grams))))


def synchronize(model, world):
    for p in model.parameters():
        if p.grad.is_sparse:
            g = p.grad.coalesce()
            found = [None] * world
            dist.all_gather_object(found, (g.indices(), g.values()))
            indices = torch.cat([i for i, _ in found], 1)
            values = torch.cat([v for _, v in found])
            p.grad = torch.sparse_coo_tensor(indices, values if args.faulty else values / world, p.shape).coalesce()
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(300)
model = Hashed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    grams, labels = torch.randint(0, 300, (18, 7), generator=g), torch.randint(0, 6, (18,), generator=g)
    loss = F.cross_entropy(model(grams[rank::world]), labels[rank::world])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        synchronize(model, world)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
