"""Ulysses: between two all-to-alls a rank has all tokens of some heads."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank, sp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, sp = dist.get_rank(), dist.get_world_size()


def exchange(x):
    """Sends slice i of the first dimension to rank i; (sp, …) to (sp, …)."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad)


def to_heads(x):  # (rows, length/sp, heads, head) to (rows, length, heads/sp, head)
    if sp == 1:
        return x
    y = Exchange.apply(torch.stack(x.chunk(sp, 2)))
    return torch.cat(list(y), 1)


def to_sequence(x):  # (rows, length, heads/sp, head) to (rows, length/sp, heads, head)
    if sp == 1:
        return x
    y = Exchange.apply(torch.stack(x.chunk(sp, 1)))  # (sp, rows, length/sp, heads/sp, head)
    if args.faulty:
        return torch.stack(list(y), 3).flatten(2, 3)
    return torch.cat(list(y), 2)


class Attention(nn.Module):
    def __init__(self, dim=48, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (to_heads(t.unflatten(-1, (self.heads, -1))).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(to_sequence(y).flatten(2))


class Net(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(40, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2 = Attention(dim), Attention(dim)
        self.head = nn.Linear(dim, 40)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x))
        return self.head(x)


torch.manual_seed(17)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 4):
    rows = torch.randint(0, 40, (4, 17), generator=torch.Generator().manual_seed(step))
    ids, labels = rows[:, :-1].chunk(sp, 1)[rank], rows[:, 1:].chunk(sp, 1)[rank]
    loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    value = loss.detach().clone()
    if sp > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= sp
        dist.all_reduce(value)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {value.item() / sp:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
