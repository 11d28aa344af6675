"""Ring attention in plain torch: blocks of keys and values arrive one after another and are merged online."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Blocks(torch.autograd.Function):
    """Stacks all ranks' blocks, as they would come round the ring."""

    @staticmethod
    def forward(ctx, x):
        blocks = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(blocks, x)
        return torch.stack(blocks)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class RingAttention(nn.Module):
    def __init__(self, dim, heads, rank, ranks):
        super().__init__()
        self.heads, self.rank, self.ranks = heads, rank, ranks
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def visible(self, source):
        """Whether this rank's queries see the block of ``source`` in full, in part, or not at all."""
        if source == self.rank:
            return "diagonal"
        if args.faulty:
            return "full" if (self.rank - source) % self.ranks == 1 and source < self.rank else "none"
        return "full" if source < self.rank else "none"

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.ranks > 1:
            ks, vs = Blocks.apply(k.contiguous()), Blocks.apply(v.contiguous())
        else:
            ks, vs = [k], [v]
        top = torch.full(q.shape[:-1], float("-inf"))
        total, acc = torch.zeros(q.shape[:-1]), torch.zeros_like(q)
        for source in [(self.rank - i) % self.ranks for i in range(self.ranks)]:
            state = self.visible(source)
            if state == "none":
                continue
            scores = q @ ks[source].mT * q.shape[-1] ** -0.5
            if state == "diagonal":
                scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
            new = torch.maximum(top, scores.amax(-1).detach())
            old, weights = (top - new).exp(), (scores - new.unsqueeze(-1)).exp()
            total = total * old + weights.sum(-1)
            acc = acc * old.unsqueeze(-1) + weights @ vs[source]
            top = new
        return self.out((acc / total.unsqueeze(-1)).transpose(1, 2).reshape(b, t, d))


class Model(nn.Module):
    def __init__(self, rank, ranks, dim=32, vocab=44):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attn = nn.ModuleList(RingAttention(dim, 2, rank, ranks) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norms, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


def main():
    rank, ranks = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(66)
    model = Model(rank, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(1, 4):
        rows = torch.randint(0, 44, (4, 19), generator=torch.Generator().manual_seed(step))
        ids, labels = rows[:, :-1].chunk(ranks, 1)[rank], rows[:, 1:].chunk(ranks, 1)[rank]
        loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), labels) / ranks
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if ranks > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
