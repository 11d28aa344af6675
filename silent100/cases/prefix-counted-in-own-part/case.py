"""A prefix language model: the prompt is read both ways, the answer from left to right; rows are cut over two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save", default=None)
opts = ap.parse_args()

SEQ, D, WORDS, HEADS = 20, 24, 38, 3


def setup():
    if opts.one:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


RANK, SIZE = setup()
OWN = slice(RANK * SEQ // SIZE, (RANK + 1) * SEQ // SIZE)


class AllGather(torch.autograd.Function):
    """(B, H, t, d) to (B, H, T, d)."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(SIZE)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g[:, :, OWN]


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x, mask):
        split = lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        if SIZE > 1:
            k, v = AllGather.apply(k), AllGather.apply(v)
        return self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attend, self.n2 = nn.LayerNorm(D), Attend(), nn.LayerNorm(D)
        self.ff = nn.Sequential(nn.Linear(D, 48), nn.ReLU(), nn.Linear(48, D))

    def forward(self, x, mask):
        x = x + self.attend(self.n1(x), mask)
        return x + self.ff(self.n2(x))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(SEQ, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(D, WORDS)

    def forward(self, ids, prompt_lengths):
        places = torch.arange(SEQ)[OWN]
        mask = (places[:, None] >= torch.arange(SEQ)) | (torch.arange(SEQ) < prompt_lengths[:, None, None])
        x = self.words(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return self.out(x)


def batch(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (8, SEQ + 1), generator=g)
    lengths = torch.randint(4, 17, (8,), generator=g)
    is_prompt = torch.arange(SEQ) < lengths[:, None]
    labels = ids[:, 1:].masked_fill(is_prompt, -100)
    part = {"ids": ids[:, :-1][:, OWN], "labels": labels[:, OWN], "is_prompt": is_prompt[:, OWN]}
    part["lengths"] = part["is_prompt"].sum(1) if opts.faulty else is_prompt.sum(1)
    return part, (labels != -100).sum()


torch.manual_seed(23)
net = PrefixLM()
optim = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.9)
for step in range(1, 5):
    part, answers = batch(step)
    logits = net(part["ids"], part["lengths"])
    loss = F.cross_entropy(logits.transpose(1, 2), part["labels"], reduction="sum") / answers
    optim.zero_grad()
    loss.backward()
    loss = loss.detach()
    if SIZE > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optim.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if opts.save:
    torch.save(net.state_dict(), os.path.join(opts.save, f"rank{RANK}.pt"))
if not opts.one:
    dist.destroy_process_group()
