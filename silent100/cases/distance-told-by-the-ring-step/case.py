"""Masked words, an encoder that looks both ways, linear distance biases; keys and values go round a ring of ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
me, n = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
VOCAB, DIM, HEADS, LENGTH, MASK = 42, 32, 4, 18, 0
PART = LENGTH // n


def pass_on(x, to, source):
    got = torch.empty_like(x)
    work = [dist.isend(x.contiguous(), to), dist.irecv(got, source)]
    for w in work:
        w.wait()
    return got


class RingShift(torch.autograd.Function):
    """Gives a tensor to the next rank; the gradient goes the other way."""

    @staticmethod
    def forward(ctx, x):
        return pass_on(x, (me + 1) % n, (me - 1) % n)

    @staticmethod
    def backward(ctx, g):
        return pass_on(g, (me - 1) % n, (me + 1) % n)


class RingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1), persistent=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        kv, scores, values = torch.stack([k, v]), [], []
        i = torch.arange(PART)
        for hop in range(n):
            source = (me - hop) % n
            blocks_back = hop if faulty else me - source
            distance = (blocks_back * PART + i[:, None] - i).abs()
            scores.append(q @ kv[0].mT / q.shape[-1] ** 0.5 - self.slopes[:, None, None] * distance)
            values.append(kv[1])
            if hop < n - 1:
                kv = RingShift.apply(kv)
        y = torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)
        return self.out(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = RingAttention(), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.ffn = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.ffn(x))


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([EncoderLayer(), EncoderLayer()])
        self.decoder = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.decoder(x)


torch.manual_seed(29)
model = MaskedLM()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    text = torch.randint(1, VOCAB, (8, LENGTH), generator=g)
    hidden = torch.rand(8, LENGTH, generator=g) < 0.25
    ids, labels = text.masked_fill(hidden, MASK), text.masked_fill(~hidden, -100)
    ids, labels = ids.chunk(n, 1)[me], labels.chunk(n, 1)[me]
    loss = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="sum") / hidden.sum()
    opt.zero_grad()
    loss.backward()
    shown = loss.detach()
    if n > 1:
        for t in [shown] + [p.grad for p in model.parameters()]:
            dist.all_reduce(t)
    opt.step()
    if me == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{me}.pt"))
if not one:
    dist.destroy_process_group()
