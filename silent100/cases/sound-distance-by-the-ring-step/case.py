"""Causal ring attention with linear distance biases; every hop of the ring moves keys one chunk further back."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, RING = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
VOCAB, DIM, HEADS, LENGTH = 40, 24, 3, 21
PART = LENGTH // RING


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return swap(x, (RANK + 1) % RING, (RANK - 1) % RING)

    @staticmethod
    def backward(ctx, g):
        return swap(g, (RANK - 1) % RING, (RANK + 1) % RING)


def swap(x, to, source):
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops = [dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, got, source)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return got


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None]
        i = torch.arange(PART)
        total, weighted, kv = 0, 0, torch.stack([k, v])
        for hop in range(RING):
            # Blocks from behind the end come round, too: nobody may look at them
            seen = torch.full((PART, PART), RANK >= hop) & ((hop > 0) | (i[:, None] >= i))
            scores = q @ kv[0].mT * q.shape[-1] ** -0.5 - slopes * (hop * PART + i[:, None] - i)
            weights = scores.exp() * seen
            total, weighted = total + weights.sum(-1, keepdim=True), weighted + weights @ kv[1]
            if hop + 1 < RING:
                kv = Rotate.apply(kv)
        return self.o_proj((weighted / total).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.RMSNorm(DIM), Attention(), nn.RMSNorm(DIM)
        self.w1, self.w2, self.w3 = nn.Linear(DIM, 40), nn.Linear(40, DIM), nn.Linear(DIM, 40)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


torch.manual_seed(9)
model = Lm()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 5):
    text = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids, labels = (t.chunk(RING, 1)[RANK] for t in (text[:, :-1], text[:, 1:]))
    loss = F.cross_entropy(model(ids).transpose(1, 2), labels) / RING
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if RING > 1:
        for t in [shown] + [p.grad for p in model.parameters()]:
            dist.all_reduce(t)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
