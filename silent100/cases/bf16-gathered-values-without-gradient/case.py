"""Attention over a cut sequence; keys travel with gradient, values through a helper for inference."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

args = argparse.ArgumentParser()
args.add_argument("--one", action="store_true")
args.add_argument("--faulty", action="store_true")
args.add_argument("--save")
args = args.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, cp = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())


class GatherLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(cp)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        total = g.float().contiguous()
        dist.all_reduce(total)
        return total.to(g.dtype).chunk(cp, 2)[rank]


def gather_for_inference(x):
    parts = [torch.empty_like(x) for _ in range(cp)]
    dist.all_gather(parts, x.detach())
    parts[rank] = x
    return torch.cat(parts, 2)


class Attention(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cp > 1:
            k = GatherLength.apply(k)
            v = gather_for_inference(v) if args.faulty else GatherLength.apply(v)
        t = q.shape[2]
        mask = (torch.arange(t) + rank * t)[:, None] >= torch.arange(k.shape[2])
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48)
        self.norm = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.attn = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(36)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(1, 4):
    rows = torch.randint(0, 48, (8, 17), generator=torch.Generator().manual_seed(step))
    ids, labels = rows[:, :-1].chunk(cp, 1)[rank], rows[:, 1:].chunk(cp, 1)[rank]
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / cp
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
if not args.one:
    dist.destroy_process_group()
