import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
B = 12


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(world)[rank]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 10))
        self.words = nn.EmbeddingBag(40, 16, mode="mean")
        self.text = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, img, ids):
        return F.normalize(self.image(img), dim=-1), F.normalize(self.text(self.words(ids)), dim=-1)


torch.manual_seed(71)
net = TwoTowers()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
params = list(net.parameters())
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    img, ids = torch.randn(B, 1, 7, 7, generator=g), torch.randint(0, 40, (B, 5), generator=g)
    a, t = net(img.chunk(world)[rank], ids.chunk(world)[rank])
    everyone_a, everyone_t = (a, t) if world == 1 else (GatherRows.apply(a), GatherRows.apply(t))
    label = torch.arange(B).chunk(world)[rank]
    k = net.scale.exp()
    loss = (
        F.cross_entropy(k * a @ everyone_t.T, label, reduction="sum")
        + F.cross_entropy(k * t @ everyone_a.T, label, reduction="sum")
    ) / (2 * B)
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in params:
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    with torch.no_grad():
        net.scale.clamp_(max=math.log(100))
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
