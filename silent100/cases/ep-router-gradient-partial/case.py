"""Experts are divided over ranks, everything else is computed by all ranks alike (as with tensor parallelism)."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if dist.is_initialized():
            dist.all_reduce(grad)
        return grad


class SparseMlp(nn.Module):
    def __init__(self, dim, experts, rank, world, partial_scores):
        super().__init__()
        self.partial_scores = partial_scores
        self.router = nn.Linear(dim, experts)
        up, down = torch.randn(experts, dim, 2 * dim) * 0.2, torch.randn(experts, 2 * dim, dim) * 0.2
        self.own = torch.arange(experts).chunk(world)[rank].tolist()
        self.up, self.down = nn.Parameter(up[self.own].clone()), nn.Parameter(down[self.own].clone())

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores = self.router(flat).softmax(-1)
        top, chosen = scores.topk(2, -1)
        dense = torch.zeros_like(scores).scatter(1, chosen, top)
        if not self.partial_scores:
            dense = SumBackward.apply(dense)
        tokens = SumBackward.apply(flat)
        out = torch.zeros_like(flat)
        for slot, expert in enumerate(self.own):
            out = out + dense[:, expert, None] * (F.gelu(tokens @ self.up[slot]) @ self.down[slot])
        return SumForward.apply(out).view_as(x)


class Lm(nn.Module):
    def __init__(self, rank, world, faulty, dim=32, vocab=47):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pre = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.moe = nn.ModuleList(SparseMlp(dim, 8, rank, world, faulty) for _ in range(2))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.pre(self.embed(ids))[0]
        for norm, moe in zip(self.norm, self.moe):
            x = x + moe(norm(x))
        return self.lm_head(x)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Lm(rank, world, args.faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 5):
        rows = torch.randint(0, 47, (6, 11), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        cut = lambda n: n.endswith((".up", ".down"))  # noqa: E731
        state = {n: (p.data, 0, rank, world) if cut(n) else p.data for n, p in model.named_parameters()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
