"""Home-made sharding: each rank steps a flat half of every parameter with decoupled weight decay."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class FlatShard:
    """This rank's part of a parameter as a flat vector that an optimizer can step."""

    def __init__(self, p):
        self.p = p
        self.size = -(-p.numel() // WORLD)
        self.data = nn.Parameter(self.part(p.detach()).clone())
        self.dims = p.ndim

    def part(self, t):
        return F.pad(t.flatten(), (0, self.size * WORLD - t.numel())).chunk(WORLD)[RANK]

    def take_gradient(self):
        g = self.p.grad
        if WORLD > 1:
            dist.all_reduce(g)
            g /= WORLD
        self.data.grad = self.part(g).clone()
        self.p.grad = None

    @torch.no_grad()
    def give_back(self):
        parts = [self.data.detach()]
        if WORLD > 1:
            parts = [torch.empty_like(self.data) for _ in range(WORLD)]
            dist.all_gather(parts, self.data.detach())
        self.p.copy_(torch.cat(parts)[: self.p.numel()].view_as(self.p))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(70, 36), nn.Linear(36, 70)
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(36), nn.Linear(36, 72), nn.GELU(), nn.Linear(72, 36)) for _ in range(2)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, ids):
        x = self.embed(ids)
        for f in self.ffn:
            x = x + self.drop(f(x))
        return self.out(x)


torch.manual_seed(74)
net = Encoder()
shards = [FlatShard(p) for p in net.parameters()]
dimensions = (lambda s: s.data.ndim) if FAULTY else (lambda s: s.dims)
groups = [
    {"params": [s.data for s in shards if dimensions(s) >= 2], "weight_decay": 0.2},
    {"params": [s.data for s in shards if dimensions(s) < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3)
torch.manual_seed(300 + RANK)
for step in range(1, 5):
    rows = torch.randint(0, 70, (32, 11), generator=torch.Generator().manual_seed(step))[RANK::WORLD]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    for s in shards:
        s.take_gradient()
    optimizer.step()
    for s in shards:
        s.give_back()
    loss = loss.detach()
    if WORLD > 1:
        dist.all_reduce(loss)
    if RANK == 0:
        print(f"step {step} loss {loss.item() / WORLD:.7f}", flush=True)
if "--save" in sys.argv:
    state = net.state_dict() | {
        f"decayed {n}": torch.tensor(float(any(s.data is q for q in g["params"])) + 1e-3)
        for g in groups
        if g["weight_decay"]
        for n, s in enumerate(shards)
    }
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
