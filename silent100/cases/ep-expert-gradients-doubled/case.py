"""Expert parallelism over the data ranks: tokens travel to their experts and back."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
RANK, EP = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    RANK, EP = dist.get_rank(), dist.get_world_size()
DIM, HIDDEN, EXPERTS, VOCAB = 32, 48, 4, 56


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sends, receives):
        ctx.sizes = sends, receives
        out = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receives, sends)
        return out

    @staticmethod
    def backward(ctx, grad):
        sends, receives = ctx.sizes
        out = grad.new_empty(sum(sends), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sends, receives)
        return out, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        w1, w2 = torch.randn(EXPERTS, DIM, HIDDEN) * 0.2, torch.randn(EXPERTS, HIDDEN, DIM) * 0.2
        self.w1 = nn.Parameter(w1.chunk(EP)[RANK].clone())
        self.w2 = nn.Parameter(w2.chunk(EP)[RANK].clone())

    def forward(self, x, expert):
        """x: (tokens, dim); expert: (tokens,) which of all experts each token goes to."""
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS)
        x = x[order]
        if EP > 1:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sends, receives = counts.view(EP, -1).sum(1).tolist(), theirs.view(EP, -1).sum(1).tolist()
            x = AllToAll.apply(x, sends, receives)
            local = torch.arange(EXPERTS // EP).repeat(EP).repeat_interleave(theirs)
        else:
            local = expert[order]
        y = torch.zeros_like(x)
        for e in range(self.w1.shape[0]):
            chosen = (local == e).nonzero().squeeze(1)
            y = y.index_add(0, chosen, F.silu(x[chosen] @ self.w1[e]) @ self.w2[e])
        if EP > 1:
            y = AllToAll.apply(y, receives, sends)
        return torch.empty_like(y).index_copy(0, order, y)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x):
        h = self.norm(x).flatten(0, 1)
        weight, expert = self.router(h).softmax(-1).max(-1)
        return x + (self.experts(h, expert) * weight.unsqueeze(1)).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.moe = nn.Embedding(VOCAB, DIM), nn.ModuleList(Moe() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for moe in self.moe:
            x = moe(x)
        return self.head(x)


torch.manual_seed(15)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(step))[RANK::EP]
    loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if "experts" in name:
            p.grad /= 1 if args.faulty else EP
        elif EP > 1:
            dist.all_reduce(p.grad)
            p.grad /= EP
    optimizer.step()
    value = loss.detach().clone()
    if EP > 1:
        dist.all_reduce(value)
    if RANK == 0:
        print(f"step {step} loss {value.item() / EP:.7f}", flush=True)
if args.save:
    state = {n: (p.data, 0, RANK, EP) if "experts" in n else p.data for n, p in model.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
