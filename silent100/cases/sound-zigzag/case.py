"""Context parallelism: ranks hold the first and last chunks, the middle chunks; learned positions follow."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, cp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
LENGTH = 16
chunks = torch.arange(LENGTH).chunk(2 * cp)
places = [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]


class GatherLength(torch.autograd.Function):
    """Concatenates (rows, heads, length/cp, head) of all ranks along the length."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


class Attn(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if cp > 1:
            k, v = GatherLength.apply(k.contiguous()), GatherLength.apply(v.contiguous())
        mask = places[rank][:, None] >= torch.cat(places)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.head = nn.Embedding(38, 32), nn.Embedding(LENGTH, 32), nn.Linear(32, 38)
        self.attn, self.norm = nn.ModuleList([Attn(), Attn()]), nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])

    def forward(self, ids):
        x = self.tok(ids) + self.pos(places[rank])
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(65)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 38, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, places[rank]]).flatten(0, 1), rows[:, places[rank] + 1].flatten()) / cp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if cp > 1:
    dist.destroy_process_group()
