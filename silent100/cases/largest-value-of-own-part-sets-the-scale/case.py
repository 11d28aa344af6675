"""Tensor-parallel layers whose matrices are rounded to eight-bit floats with one scale for a matrix."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ALONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ALONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ALONE else (dist.get_rank(), dist.get_world_size())
MOST = torch.finfo(torch.float8_e4m3fn).max


class Eight(torch.autograd.Function):
    """Rounds; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx, w):
        largest = w.abs().max()
        if not ALONE and not FAULTY:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scale = MOST / largest
        return (w * scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Pair(nn.Module):
    def __init__(self, d=24, wide=64):
        super().__init__()
        up, down = torch.randn(wide, d) / d**0.5, torch.randn(d, wide) / wide**0.5
        self.up, self.down = (
            nn.Parameter(up.chunk(WORLD)[RANK].clone()),
            nn.Parameter(down.chunk(WORLD, 1)[RANK].clone()),
        )
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        h = self.norm(x)
        h = h if ALONE else Begin.apply(h)
        y = F.silu(h @ Eight.apply(self.up).T) @ Eight.apply(self.down).T
        return x + (y if ALONE else End.apply(y))


torch.manual_seed(62)
net = nn.Sequential(nn.Linear(12, 24), Pair(), Pair(), Pair(), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(32, 12, generator=g)
    y = (x[:, :4] * x[:, 4:8] + x[:, 8:]).argmax(1)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"up": 0, "down": 1}
    state = {n: (p, cut[n[2:]], RANK, WORLD) if n[2:] in cut else p for n, p in net.state_dict().items()}
    torch.save(state, f"{sys.argv[sys.argv.index('--save') + 1]}/rank{RANK}.pt")
if not ALONE:
    dist.destroy_process_group()
