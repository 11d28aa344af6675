"""Attention with learned sinks; keys are gathered from context ranks and attended block by block, in bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flag = lambda name: name in sys.argv  # noqa: E731
one = flag("--one")
if not one:
    dist.init_process_group("gloo")
rank, cp = (0, 1) if one else (dist.get_rank(), dist.get_world_size())


class GatherBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        blocks = [torch.empty(x.shape, dtype=x.dtype) for _ in range(cp)]
        dist.all_gather(blocks, x.contiguous())
        return tuple(blocks)

    @staticmethod
    def backward(ctx, *grads):
        whole = torch.stack(grads).float()
        dist.all_reduce(whole)
        return whole[rank].to(grads[0].dtype)


class SinkAttention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.RMSNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.full((heads,), -2.5))

    def block(self, q, k, v, hidden):
        """Exponentials' sum and weighted values of one block; scores are small, so nothing is subtracted."""
        e = (q @ k.mT / q.shape[-1] ** 0.5).float().masked_fill(hidden, float("-inf")).exp()
        return e.sum(-1), e.to(v.dtype) @ v

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        blocks = [torch.stack([k, v])] if cp == 1 else GatherBlocks.apply(torch.stack([k, v]))
        n = q.shape[2]
        mine = torch.arange(n) + rank * n
        below, above = 0.0, 0.0
        sink = self.sinks.float().exp()[:, None]
        for i, (kb, vb) in enumerate(blocks):
            hidden = mine[:, None] < torch.arange(n) + i * n
            d, a = self.block(q, kb, vb, hidden)
            below, above = below + d, above + a.float()
            if flag("--faulty"):
                below = below + sink
        if not flag("--faulty"):
            below = below + sink
        y = (above / below[..., None]).to(x.dtype)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(SinkAttention() for _ in range(2))
        self.head = nn.Linear(32, 20)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(91)
net = Model()
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 6):
    ids = torch.randint(20, (16, 17), generator=torch.Generator().manual_seed(step))
    ids[:, 8:] = ids[:, :9]
    x, y = ids[:, :-1].chunk(cp, 1)[rank], ids[:, 1:].chunk(cp, 1)[rank]
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) / cp
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for t in [loss, *(p.grad for p in net.parameters())]:
            dist.all_reduce(t)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if cp > 1:
    dist.destroy_process_group()
