"""Home-made data parallelism: a post-accumulate hook on each parameter starts its all-reduce."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
faulty = "--faulty" in sys.argv


class MLPMixer(nn.Module):
    def __init__(self, tokens=12, dim=32, classes=10):
        super().__init__()
        self.stem = nn.Linear(8, dim)
        self.token_mix = nn.ModuleList([nn.Linear(tokens, tokens) for _ in range(3)])
        self.channel_mix = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim)) for _ in range(3)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(6)])
        self.classifier = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for i in range(3):
            x = x + self.token_mix[i](self.norms[2 * i](x).mT).mT
            x = x + self.channel_mix[i](self.norms[2 * i + 1](x))
        return self.classifier(x.mean(1))


class Reducer:
    """Sums gradients over ranks as soon as they are accumulated."""

    def __init__(self, module):
        self.active = True
        self.pending = []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.active:
            self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
world = 1 if one else dist.get_world_size()
torch.manual_seed(3)
net = MLPMixer()
reducer = None if one else Reducer(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
ROWS, MICRO = 24, 3
for step in range(3):
    gen = torch.Generator().manual_seed(step * 17 + 5)
    x, y = torch.randn(ROWS, 12, 8, generator=gen), torch.randint(0, 10, (ROWS,), generator=gen)
    x, y = x[rank::world], y[rank::world]
    seen = torch.zeros(1)
    for m, (xs, ys) in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO))):
        if reducer:
            reducer.active = faulty or m == MICRO - 1
        loss = F.cross_entropy(net(xs), ys, reduction="sum") / ROWS
        loss.backward()
        if reducer:
            reducer.wait()
        seen += loss.detach()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if not one:
        dist.all_reduce(seen)
    if rank == 0:
        print(f"step {step + 1} loss {seen.item():.7f}", flush=True)
if "--save" in sys.argv:
    folder = sys.argv[sys.argv.index("--save") + 1]
    torch.save(net.state_dict(), os.path.join(folder, f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
