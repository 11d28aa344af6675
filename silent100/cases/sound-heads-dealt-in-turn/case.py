# Tensor parallelism that deals heads and hidden units out like cards: rank r has every second one from r on.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

one = "--one" in sys.argv
rank, tp = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
D, HEADS, HIDDEN, WORDS = 32, 4, 48, 41


def own(count, each=1):
    """The rows of a rank: of count things of some size, every tp-th."""
    rows = torch.arange(count * each).view(count, each)
    return rows[rank::tp].flatten()


class ToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        if tp > 1:
            g = g.contiguous()
            dist.all_reduce(g)
        return g


class FromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if tp > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def dealt(inputs, outputs, rows=None, columns=None, bias=True):
    """A linear layer that keeps some rows or columns of a whole one."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    if rows is not None:
        layer.weight = nn.Parameter(layer.weight.data[rows])
        layer.bias = nn.Parameter(layer.bias.data[rows]) if bias else None
    if columns is not None:
        layer.weight = nn.Parameter(layer.weight.data[:, columns])
    return layer


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        heads, units = own(HEADS, D // HEADS), own(HIDDEN)
        self.q, self.k, self.v = (dealt(D, D, rows=heads) for _ in range(3))
        self.o = dealt(D, D, columns=heads, bias=False)
        self.up, self.down = dealt(D, HIDDEN, rows=units), dealt(HIDDEN, D, columns=units, bias=False)
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x):
        h = ToRanks.apply(self.ln1(x))
        q, k, v = (w(h).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + FromRanks.apply(self.o(y))
        h = ToRanks.apply(self.ln2(x))
        return x + FromRanks.apply(self.down(F.gelu(self.up(h))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, D), nn.Embedding(16, D)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(D, WORDS)

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def undealt(p, dim):
    """Puts the parts of all ranks back into the order of one process."""
    if tp == 1:
        return p.data
    parts = [torch.empty_like(p.data) for _ in range(tp)]
    dist.all_gather(parts, p.data.contiguous())
    return parts


torch.manual_seed(19)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3, foreach=False)
for step in range(1, 5):
    ids = torch.randint(0, WORDS, (6, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in model.named_parameters():
        part = name.split(".")[-2]
        state[name] = p.data
        if tp > 1 and part in ("q", "k", "v", "o", "up", "down"):
            dim, each = int(part in ("o", "down")), 1 if part in ("up", "down") else D // HEADS
            parts = [t.unflatten(dim, (-1, each)) for t in undealt(p, dim)]
            state[name] = torch.stack(parts, dim + 1).flatten(dim, dim + 2)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
