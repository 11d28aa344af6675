"""Two towers; negatives are a batch's own items, and logits are corrected by how often an item has been seen so far."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
USERS, ITEMS, ROWS = 50, 30, 64
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Popularity(nn.Module):
    """Counts items, starting from one each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(ITEMS))

    @torch.no_grad()
    def update(self, items):
        new = torch.bincount(items, minlength=ITEMS).float()
        if world > 1 and not FAULTY:
            dist.all_reduce(new)
        self.seen += new

    def forward(self, items):
        return (self.seen[items] / self.seen.sum()).log()


class TwoTowers(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, d), nn.Embedding(ITEMS, d)
        self.user_tower = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, d))
        self.item_tower = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, d))
        self.popularity = Popularity()

    def forward(self, users, items):
        self.popularity.update(items)
        # All items of a rank's groups of eight rows are candidates
        u = F.normalize(self.user_tower(self.users(users)), dim=-1).view(-1, 8, 16)
        v = F.normalize(self.item_tower(self.items(items)), dim=-1).view(-1, 8, 16)
        logits = u @ v.transpose(1, 2) / 0.2 - self.popularity(items).view(-1, 1, 8)
        same = items.view(-1, 1, 8) == items.view(-1, 8, 1)
        logits = logits.masked_fill(same & ~torch.eye(8, dtype=torch.bool), -1e4)
        return F.cross_entropy(logits.flatten(0, 1), torch.arange(8).repeat(len(u)))


torch.manual_seed(30)
model = TwoTowers()
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3000 + rank)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    users = torch.randint(0, USERS, (ROWS,), generator=g)
    items = ((users / USERS) ** 2 * ITEMS + torch.rand(ROWS, generator=g) * 5).long() % ITEMS
    loss = model(users.chunk(world)[rank], items.chunk(world)[rank])
    sgd.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    sgd.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
