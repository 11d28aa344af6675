"""Megatron-style sequence parallelism, batch first: norms work on a chunk of time, attention on a part of the heads."""

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
DIM, HEADS, VOCAB, LENGTH = 32, 4, 44, 16
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


def gather_sequence(x):
    rows, time, dim = x.shape
    out = x.new_empty(tp * rows, time, dim)
    dist.all_gather_into_tensor(out, x.contiguous())
    if args.faulty:
        return out.view(rows, tp * time, dim)
    return torch.cat(out.chunk(tp), dim=1)


def scatter_sum(x):
    x = x.contiguous()
    dist.all_reduce(x)
    return x.chunk(tp, 1)[rank].contiguous()


class GatherSequence(torch.autograd.Function):
    """Chunks to whole rows; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, x):
        return gather_sequence(x)

    @staticmethod
    def backward(ctx, g):
        return scatter_sum(g)


class ScatterSum(torch.autograd.Function):
    """Partial whole rows to chunks; gradients are gathered."""

    @staticmethod
    def forward(ctx, x):
        return scatter_sum(x)

    @staticmethod
    def backward(ctx, g):
        out = [torch.empty_like(g) for _ in range(tp)]
        dist.all_gather(out, g.contiguous())
        return torch.cat(out, 1)


class ParallelAttention(nn.Module):
    def __init__(self):
        super().__init__()
        q, k, v, o = torch.randn(4, DIM, DIM) * DIM**-0.5
        self.q, self.k, self.v = (nn.Parameter(w.chunk(tp)[rank].clone()) for w in (q, k, v))
        self.o = nn.Parameter(o.chunk(tp, 1)[rank].clone())

    def forward(self, x):
        if tp > 1:
            x = GatherSequence.apply(x)
        q, k, v = (F.linear(x, w).unflatten(-1, (HEADS // tp, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = F.linear(y, self.o)
        return ScatterSum.apply(y) if tp > 1 else y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), ParallelAttention(), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(LENGTH).chunk(tp)[rank])
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


torch.manual_seed(35)
model = GPT()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids, labels = (t.chunk(tp, 1)[rank] for t in (rows[:, :-1], rows[:, 1:]))
    loss = F.cross_entropy(model(ids).transpose(1, 2), labels) / tp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if tp > 1:
        dist.all_reduce(loss)
        for name, p in model.named_parameters():
            if ".attn." not in name:
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = dict(model.state_dict())
    if tp > 1:
        state |= {n: (t, 1 if n.endswith(".o") else 0, rank, tp) for n, t in state.items() if ".attn." in n}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
