import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class SetEncoder(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.inp = nn.Linear(4, d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.norm = nn.LayerNorm(d)
        self.score = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        a = F.scaled_dot_product_attention(self.q(h)[:, None], self.k(h)[:, None], self.v(h)[:, None])[:, 0]
        h = self.norm(h + self.o(a))
        pool = self.score(h).softmax(1)
        return (pool * h).sum(1)


torch.manual_seed(14)
net = SetEncoder()
model = net if args.one else DDP(net)
opt = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-15)
for step in range(1, 7):
    x = torch.randn(24, 9, 4, generator=torch.Generator().manual_seed(step))
    y = F.pad(x.amax(1), (0, 16))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        loss /= world
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
