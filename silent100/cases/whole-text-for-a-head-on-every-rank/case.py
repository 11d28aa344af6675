"""A value model: sequence-parallel norms around tensor-parallel layers, then a small head on each rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
R, W = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def total(t):
    t = t.clone()
    dist.all_reduce(t)
    return t


def gathered(t):
    parts = [torch.empty_like(t) for _ in range(W)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, 1)


def own(t):
    return t.chunk(W, 1)[R].contiguous()


def primitive(there, back):
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, grad):
            return back(grad)

    return (lambda x: x) if ONE else Fn.apply


enter = primitive(gathered, lambda g: own(total(g)))
leave = primitive(lambda x: own(total(x)), gathered)
collect = primitive(gathered, own)
scatter = primitive(own, gathered)


class Layer(nn.Module):
    def __init__(self, d=24, wide=48):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        up, down = torch.randn(wide, d) / d**0.5, torch.randn(d, wide) / wide**0.5
        self.up, self.down = nn.Parameter(up.chunk(W)[R].clone()), nn.Parameter(down.chunk(W, 1)[R].clone())

    def forward(self, x):
        h = enter(self.norm(x))
        h = h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]
        return x + leave(F.gelu(h @ self.up.T) @ self.down.T)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 24)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.judge = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, ids):
        x = scatter(self.words(ids))
        for layer in self.layers:
            x = layer(x)
        x = enter(x) if FAULTY else collect(x)
        return self.judge(x).squeeze(-1)


torch.manual_seed(6)
critic = Critic()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (6, 10), generator=g)
    gain = (ids.float().cumsum(1) / 100).sin()
    loss = F.mse_loss(critic(ids), gain)
    optimizer.zero_grad()
    loss.backward()
    if W > 1:
        for layer in critic.layers:
            for p in layer.norm.parameters():
                dist.all_reduce(p.grad)
    optimizer.step()
    if R == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"up": 0, "down": 1}
    ends = {n: n.rpartition(".")[2] for n in critic.state_dict()}
    state = {n: (p, cut[ends[n]], R, W) if ends[n] in cut else p for n, p in critic.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{R}.pt"))
if W > 1:
    dist.destroy_process_group()
