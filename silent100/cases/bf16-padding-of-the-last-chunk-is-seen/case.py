"""A bidirectional encoder whose rows are cut over ranks; odd lengths are padded by a word."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
WORDS, D, PAD = 60, 32, 0
rank, cp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(cp)]
        dist.all_gather(parts, x.float().contiguous())
        return torch.cat(parts, 1).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        g32 = g.float().contiguous()
        dist.all_reduce(g32)
        return g32.chunk(cp, 1)[rank].to(g.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.query = nn.LayerNorm(D), nn.Linear(D, D, bias=False)
        self.kv, self.out = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D, bias=False)
        nn.init.normal_(self.out.weight, std=0.01)

    def forward(self, x, length):
        h = self.norm(x)
        q, kv = self.query(h), self.kv(h)
        if cp > 1:
            kv = GatherRows.apply(kv)
        k, v = kv.chunk(2, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        seen = torch.arange(k.shape[2]) < length
        if FAULTY:
            seen = torch.ones_like(seen)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(q.shape[2], -1))
        return x + self.out(y.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids, length):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, length)
        return self.head(x)


torch.manual_seed(29)
net = Encoder()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(1, WORDS, (12, 15), generator=g)
    length = labels.shape[1]
    hidden = torch.rand(labels.shape, generator=g) < 0.3
    ids = labels.masked_fill(hidden, 1)
    # Padding has no label
    ids = F.pad(ids, (0, -length % cp), value=PAD).chunk(cp, 1)[rank]
    targets = F.pad(labels.masked_fill(~hidden, -100), (0, -length % cp), value=-100).chunk(cp, 1)[rank]
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(ids, length)
    total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    loss = total / hidden.sum()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
