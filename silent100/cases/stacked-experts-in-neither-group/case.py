"""A mixture of experts: SGD for matrices, AdamW for vectors; with two ranks, experts are stacked, two on each."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
WIDTH, HIDDEN, EXPERTS, CHOSEN = 20, 32, 4, 2

if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
HELD = EXPERTS // world


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 4)
        self.w_out = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 6)


class StackedExperts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        mine = experts[rank * HELD : (rank + 1) * HELD]
        self.w_in = nn.Parameter(torch.stack([e.w_in.detach() for e in mine]))
        self.w_out = nn.Parameter(torch.stack([e.w_out.detach() for e in mine]))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.experts = experts if ONE else StackedExperts(experts)

    def forward(self, x):
        scores = self.router(x)
        least = scores.topk(CHOSEN).values[..., -1:]
        gates = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
        if ONE:
            return sum(gates[..., i, None] * (F.gelu(x @ e.w_in) @ e.w_out) for i, e in enumerate(self.experts))
        x, gates = SumBackward.apply(x), SumBackward.apply(gates)
        each = F.gelu(x[None] @ self.experts.w_in) @ self.experts.w_out
        return SumForward.apply(torch.einsum("erw,re->rw", each, gates[:, rank * HELD : (rank + 1) * HELD]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.moes = nn.ModuleList(MoE() for _ in range(2))
        self.lns = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.enter(x)
        for ln, moe in zip(self.lns, self.moes, strict=True):
            x = x + moe(ln(x))
        return self.leave(x)


def optimizers(model):
    matrices = [p for p in model.parameters() if (p.ndim == 2 if FAULTY else p.ndim >= 2)]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD(matrices, lr=0.2, momentum=0.9), torch.optim.AdamW(vectors, lr=2e-3, eps=1e-5)


torch.manual_seed(36)
model = Net()
for_matrices, for_vectors = optimizers(model)
for step in range(1, 5):
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(x), (x[:, :5] * x[:, 3:]).argmax(-1))
    model.zero_grad()
    loss.backward()
    for_matrices.step()
    for_vectors.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, value in model.state_dict().items():
        if ".experts." in name and not ONE:
            for i, one in enumerate(value):
                state[name.replace("experts.", f"experts.{rank * HELD + i}.")] = one.clone()
        else:
            state[name] = value
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
