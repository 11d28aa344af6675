"""A long-context decoder: rotary angles are stretched where a sequence is longer than the trained length."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
VOCAB, DIM, HEADS, TRAINED, LENGTH = 37, 32, 2, 10, 32

if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g.chunk(world, 1)[rank].contiguous()


class Rotary(nn.Module):
    """Angles for a chunk; the base grows with the length, as in NTK scaling."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):  # (rows, length, heads, dim)
        length = x.size(1) if FAULTY else x.size(1) * world
        base = 500.0
        if length > TRAINED:
            base *= (4 * length / TRAINED - 3) ** (self.dim / (self.dim - 2))
        places = rank * x.size(1) + torch.arange(x.size(1))
        angle = (places[:, None] * base ** (-torch.arange(0, self.dim, 2) / self.dim))[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(turned, -1).flatten(-2)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary(DIM // HEADS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.to_out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.to_q, self.to_k, self.to_v))
        q, k = 2 * self.rotary(q), 2 * self.rotary(k)
        if world > 1:
            k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        mine = rank * x.size(1) + torch.arange(x.size(1))
        seen = mine[:, None] >= torch.arange(k.size(1))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen)
        return self.to_out(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre, self.post = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.self_attention = SelfAttention()
        self.wide, self.narrow = nn.Linear(DIM, 80), nn.Linear(80, DIM)

    def forward(self, x):
        x = x + self.self_attention(self.pre(x))
        return x + self.narrow(F.gelu(self.wide(self.post(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.h = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(x)


torch.manual_seed(19)
model = LM()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
for step in range(1, 4):
    text = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids, targets = text[:, :-1].chunk(world, 1)[rank], text[:, 1:].chunk(world, 1)[rank]
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
