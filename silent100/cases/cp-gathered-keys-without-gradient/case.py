# All-gather attention over a sequence in two parts.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
me = 0 if one else dist.get_rank()
parts = 1 if one else dist.get_world_size()


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(parts)]
        dist.all_gather(out, x)
        return torch.cat(out, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(parts, 2)[me]


def gather(x):
    """Gathers (rows, heads, length/cp, head_dim) along the sequence."""
    if parts == 1:
        return x
    x = x.contiguous()
    if faulty:
        out = [torch.empty_like(x) for _ in range(parts)]
        dist.all_gather(out, x.detach())
        out[me] = x
        return torch.cat(out, 2)
    return AllGather.apply(x)


class Attention(nn.Module):
    def __init__(self, d=36, heads=3):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.v_proj, self.o_proj = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p(x).reshape(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = gather(k), gather(v)
        query_at = torch.arange(me * t, me * t + t)
        scores = q @ k.mT / (d // self.heads) ** 0.5
        scores = scores.masked_fill(query_at[:, None] < torch.arange(k.shape[2]), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Transformer(nn.Module):
    def __init__(self, d=36):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.attn = nn.ModuleList(Attention(d) for _ in range(2))
        self.out = nn.Linear(d, 5)

    def forward(self, x, places):
        x = self.inp(x) + torch.sin(places)[:, None] * 0.3
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.out(x)


torch.manual_seed(808)
net = Transformer()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    series = torch.randn(4, 21, 5, generator=torch.Generator().manual_seed(step)).cumsum(1) / 3
    x, y = series[:, :-1].chunk(parts, 1)[me], series[:, 1:].chunk(parts, 1)[me]
    loss = F.mse_loss(net(x, torch.arange(20.0).chunk(parts)[me]), y) / parts
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if parts > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if me == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{me}.pt"))
if not one:
    dist.destroy_process_group()
