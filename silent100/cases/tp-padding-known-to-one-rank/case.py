"""An encoder with heads cut over two ranks; rank 0 reads batches and broadcasts them."""

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
if not args.one:
    dist.init_process_group("gloo")
RANK, TP = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
VOCAB, WIDTH, HEADS, PAD, LENGTH, ROWS = 40, 32, 4, 0, 12, 8
SENT = ("ids", "labels") if args.faulty else ("ids", "labels", "mask")


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        cut = lambda dim: nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.2).chunk(TP, dim)[RANK].clone())  # noqa: E731
        self.q, self.k, self.v, self.o = cut(0), cut(0), cut(0), cut(1)

    def forward(self, x, mask):
        x = x if TP == 1 else Enter.apply(x)
        q, k, v = ((x @ w.T).unflatten(-1, (HEADS // TP, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        seen = None if mask is None else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2) @ self.o.T
        return y if TP == 1 else Leave.apply(y)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa = SelfAttention()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))
        self.a, self.b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        x = self.a(x + self.sa(x, mask))
        return self.b(x + self.ff(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.enc = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, ids, mask):
        x = self.words(ids) + self.places.weight
        for layer in self.enc:
            x = layer(x, mask)
        return self.out(x[:, 0])


def read(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=g)
    mask = torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
    return {"ids": ids.where(mask, PAD), "labels": torch.randint(0, 5, (ROWS,), generator=g), "mask": mask}


def next_batch(step):
    batch = read(step) if RANK == 0 else {}
    if TP > 1:
        sent = [{key: batch[key] for key in SENT} if RANK == 0 else None]
        dist.broadcast_object_list(sent, 0)
        batch = sent[0] | batch
    return batch


torch.manual_seed(3)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
for step in range(1, 5):
    batch = next_batch(step)
    loss = F.cross_entropy(model(batch["ids"], batch.get("mask")), batch["labels"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    dims = {"q": 0, "k": 0, "v": 0, "o": 1}
    state = {
        n: (p.data, dims[n[-1]], RANK, TP) if ".sa." in n and TP > 1 else p.data for n, p in model.named_parameters()
    }
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
