"""A CaiT-like network on patches: tensor-parallel layers, sequence-parallel norms and layer scales, bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, SIZE = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def joined(x):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(SIZE)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def part_of_sum(x):
    total = x.float().contiguous()
    if SIZE > 1:
        dist.all_reduce(total)
    return total.to(x.dtype).chunk(SIZE, 1)[RANK]


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return joined(x) if SIZE > 1 else x.clone()

    @staticmethod
    def backward(ctx, g):
        return part_of_sum(g.clone())


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return part_of_sum(x.clone())

    @staticmethod
    def backward(ctx, g):
        return joined(g) if SIZE > 1 else g


class Branch(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.norm, self.gamma = nn.LayerNorm(d), nn.Parameter(torch.full((d,), 0.3))
        self.up = nn.Parameter((torch.randn(hidden, d) * 0.2).chunk(SIZE)[RANK].clone())
        self.down = nn.Parameter((torch.randn(d, hidden) * 0.15).chunk(SIZE, 1)[RANK].clone())
        self.norm.weight.sequence_parallel = self.norm.bias.sequence_parallel = True
        self.gamma.sequence_parallel = not FAULTY

    def forward(self, x):
        h = F.linear(Join.apply(self.norm(x)), self.up)
        return x + self.gamma * Part.apply(F.linear(F.gelu(h), self.down))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.patches, self.norm, self.head = nn.Linear(12, d), nn.LayerNorm(d), nn.Linear(d, 12)
        self.branches = nn.ModuleList(Branch(d, 64) for _ in range(3))
        for module in (self.patches, self.norm, self.head):
            for p in module.parameters():
                p.sequence_parallel = True

    def forward(self, x):
        x = self.patches(x)
        for branch in self.branches:
            x = branch(x)
        return self.head(self.norm(x))


torch.manual_seed(239)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, eps=1e-3)
for step in range(1, 5):
    pictures = torch.randn(16, 8, 12, generator=torch.Generator().manual_seed(step))
    pictures += torch.arange(8)[:, None] * 0.1
    goal = pictures.flip(-1).tanh()
    with torch.autocast("cpu", torch.bfloat16):
        out = net(pictures.chunk(SIZE, 1)[RANK])
    loss = F.mse_loss(out.float(), goal.chunk(SIZE, 1)[RANK]) / SIZE
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if SIZE > 1:
        for p in net.parameters():
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"up": 0, "down": 1}
    state = {}
    for name, p in net.named_parameters():
        last = name.split(".")[-1]
        state[name] = (p.data, cut[last], RANK, SIZE) if last in cut else p.data
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
