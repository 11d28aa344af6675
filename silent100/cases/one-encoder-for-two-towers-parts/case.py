"""Retrieval with one encoder for both sides: rank 0 reads the queries, rank 1 the documents, and features meet."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
VOCAB, DIM, PAIRS = 60, 32, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.conv, self.norm = nn.Conv1d(DIM, DIM, 3, padding=1), nn.LayerNorm(DIM)
        self.fc, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.2)

    def forward(self, ids):
        x = self.words(ids)
        x = self.norm(x + F.gelu(self.conv(x.mT)).mT).mean(1)
        return x + self.drop(F.gelu(self.fc(x)))


class Retriever(nn.Module):
    """``sides`` are those that this process reads."""

    def __init__(self, sides):
        super().__init__()
        self.encoder = Encoder()
        heads = {side: nn.Linear(DIM, 16) for side in ("query", "document")}
        self.heads = nn.ModuleDict({side: heads[side] for side in sides})

    def forward(self, side, ids):
        return F.normalize(self.heads[side](self.encoder(ids)), dim=-1)


class Exchange(torch.autograd.Function):
    """Features of both sides; each side's gradient is summed where its features came from."""

    @staticmethod
    def forward(ctx, own):
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own.contiguous())
        return tuple(both)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


def contrast(queries, documents):
    scores = queries @ documents.T * 5
    target = torch.arange(len(scores))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
sides = ("query", "document") if args.one else (("query", "document")[rank],)
torch.manual_seed(21)
model = Retriever(sides)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
torch.manual_seed(300 + rank)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    documents = torch.randint(0, VOCAB, (PAIRS, 12), generator=g)
    batch = {"query": documents[:, 3:8], "document": documents}
    features = [model(side, batch[side]) for side in sides]
    # Both ranks compute the loss from all features, each for one half of the gradient
    loss = contrast(*features) if args.one else contrast(*Exchange.apply(features[0])) / 2
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
        if not args.faulty:
            for p in model.encoder.parameters():
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
