"""A translator whose decoder is cut by heads over tensor ranks; its encoder is whole on each."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
D, HEADS, VOCAB = 24, 4, 16


class Region(torch.autograd.Function):
    """Sums over ranks in one of the two directions."""

    @staticmethod
    def forward(ctx, x, enter):
        ctx.enter = enter
        x = x.contiguous().clone()
        if tp > 1 and not enter:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if tp > 1 and ctx.enter:
            dist.all_reduce(g)
        return g, None


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D // tp, bias=False) for _ in range(3))
        self.out = nn.Linear(D // tp, D, bias=False)

    def forward(self, x, memory=None):
        h = Region.apply(self.norm(x), True)
        if memory is None:
            memory = h
        elif not args.faulty:
            memory = Region.apply(memory, True)
        q, k, v = (
            t.unflatten(-1, (HEADS // tp, -1)).transpose(1, 2) for t in (self.q(h), self.k(memory), self.v(memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        return x + Region.apply(self.out(y), False)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict(
            {"words": nn.Embedding(VOCAB, D), "gru": nn.GRU(D, D // 2, batch_first=True, bidirectional=True)}
        )
        self.decoder = nn.ModuleDict({"words": nn.Embedding(VOCAB, D)})
        for i in range(2):
            self.decoder[f"self{i}"], self.decoder[f"cross{i}"] = Attention(True), Attention(False)
        self.decoder["head"] = nn.Linear(D, VOCAB)

    def encode(self, ids):
        return self.encoder["gru"](self.encoder["words"](ids))[0]

    def decode(self, ids, memory):
        x = self.decoder["words"](ids)
        for i in range(2):
            x = self.decoder[f"cross{i}"](self.decoder[f"self{i}"](x), memory)
        return self.decoder["head"](x)


def fill(net):
    """Same weights whatever the cut."""
    g = torch.Generator().manual_seed(73)
    for name, p in net.named_parameters():
        dim = 1 if ".out." in name else 0 if any(f".{x}." in name for x in "qkv") else None
        if dim is None:
            p.data = torch.randn(p.shape, generator=g) * 0.2 + float(name.endswith("norm.weight"))
        else:
            p.data = (torch.randn(D, D, generator=g) * 0.25).chunk(tp, dim)[rank].clone()
        p.dim_of_cut = dim


net = Translator()
fill(net)
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.02)
for step in range(1, 6):
    source = torch.randint(1, VOCAB, (6, 9), generator=torch.Generator().manual_seed(step))
    target = source.flip(1)
    logits = net.decode(F.pad(target[:, :-1], (1, 0)), net.encode(source))
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: p.data if p.dim_of_cut is None else (p.data, p.dim_of_cut, rank, tp) for n, p in net.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if tp > 1:
    dist.destroy_process_group()
