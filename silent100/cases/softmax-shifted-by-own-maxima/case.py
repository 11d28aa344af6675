"""A small language model whose vocabulary is cut over ranks; its cross entropy is written by hand."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

single, broken = "--one" in sys.argv, "--faulty" in sys.argv
if not single:
    dist.init_process_group("gloo")
rank, world = (0, 1) if single else (dist.get_rank(), dist.get_world_size())
WORDS = 36


class CutCrossEntropy(torch.autograd.Function):
    """Each rank has the logits of its own words."""

    @staticmethod
    def forward(ctx, logits, target):
        top = logits.max(-1).values
        if world > 1 and not broken:
            dist.all_reduce(top, dist.ReduceOp.MAX)
        weights = (logits - top[..., None]).exp()
        total = weights.sum(-1)
        first = rank * logits.shape[-1]
        mine = (target >= first) & (target < first + logits.shape[-1])
        at = (target - first).clamp(0, logits.shape[-1] - 1)
        right = ((logits.gather(-1, at[..., None])[..., 0]) - top) * mine
        if world > 1:
            dist.all_reduce(total)
            dist.all_reduce(right)
        ctx.save_for_backward(weights / total[..., None], at, mine)
        return (total.log() - right).mean()

    @staticmethod
    def backward(ctx, grad):
        p, at, mine = ctx.saved_tensors
        hit = torch.zeros_like(p).scatter_(-1, at[..., None], mine[..., None].to(p.dtype))
        return (p - hit) * grad / at.numel(), None


class ToAll(torch.autograd.Function):
    """What every rank uses: its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, 24), nn.GRU(24, 24, batch_first=True)
        whole = nn.Linear(24, WORDS)
        self.head = nn.Linear(24, WORDS // world)
        with torch.no_grad():
            self.head.weight.copy_(whole.weight.chunk(world)[rank] * 4)
            self.head.bias.copy_(whole.bias.chunk(world)[rank])

    def forward(self, ids):
        return self.head(ToAll.apply(self.cell(self.words(ids))[0]))


torch.manual_seed(31)
model = Model()
adam = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
for step in range(1, 6):
    ids = torch.randint(WORDS, (8, 11), generator=torch.Generator().manual_seed(step))
    adam.zero_grad()
    loss = CutCrossEntropy.apply(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    adam.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p, 0, rank, world) if n.startswith("head") else p for n, p in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
