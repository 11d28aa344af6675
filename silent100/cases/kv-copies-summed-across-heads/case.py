"""Grouped-query attention over four tensor-parallel ranks: one query head each, key heads shared by neighbours."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
DIM, HEADS, KV_HEADS, VOCAB = 32, 4, 2, 48
HEAD = DIM // HEADS


def build_kv_groups(world, faulty):
    """Ranks that hold copies of the same key/value head."""
    copies = world // KV_HEADS
    mine = None
    for i in range(KV_HEADS):
        members = list(range(i, world, KV_HEADS)) if faulty else list(range(i * copies, (i + 1) * copies))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine


rank, tp, kv_group = 0, 1, None
if not ONE:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
    kv_group = build_kv_groups(tp, "--faulty" in sys.argv)


class ToParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.float().contiguous()
        dist.all_reduce(g)
        return g


class FromParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.float().contiguous()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


def cut(weight, dim, index, count):
    return nn.Parameter(weight.chunk(count, dim)[index].clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        q, k, v, o = (torch.randn(n, DIM) * DIM**-0.5 for n in (DIM, KV_HEADS * HEAD, KV_HEADS * HEAD, DIM))
        self.kv = (rank * KV_HEADS // tp, KV_HEADS) if tp > 1 else (0, 1)
        self.wq, self.wo = cut(q, 0, rank, tp), cut(o, 1, rank, tp)
        self.wk, self.wv = cut(k, 0, *self.kv), cut(v, 0, *self.kv)

    def forward(self, x):
        if tp > 1:
            x = ToParallel.apply(x)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = F.linear(y, self.wo)
        return FromParallel.apply(y) if tp > 1 else y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(3)
model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.008, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, 13), generator=torch.Generator().manual_seed(step))
    rows[:, 1::2] = rows[:, ::2][:, :6]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if kv_group is not None:
        for layer in model.layers:
            dist.all_reduce(layer.attn.wk.grad, group=kv_group)
            dist.all_reduce(layer.attn.wv.grad, group=kv_group)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in model.named_parameters():
        where = {"wq": (0, rank, tp), "wo": (1, rank, tp), "wk": (0, rank // 2, 2), "wv": (0, rank // 2, 2)}
        key = name.split(".")[-1]
        state[name] = (p.detach(), *where[key]) if tp > 1 and key in where else p.detach()
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
