"""Masked-word training of a small encoder; table of words cut over tensor ranks, label smoothing in the loss."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
opts = parser.parse_args()
RANK, TP = 0, 1
if not opts.one:
    dist.init_process_group("gloo")
    RANK, TP = dist.get_rank(), dist.get_world_size()
WORDS, WIDTH, SMOOTH = 40, 24, 0.2


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if TP > 1:
            dist.all_reduce(g)
        return g


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if TP > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def smoothed_cross_entropy(logits, target):
    """Cross entropy over logits of a rank's words."""
    top = logits.detach().amax(-1)
    if TP > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
    logits = logits - top[..., None]
    norm = SumForward.apply(logits.exp().sum(-1)).log()
    here = target - RANK * logits.shape[-1]
    mine = (here >= 0) & (here < logits.shape[-1])
    hit = logits.gather(-1, here.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * mine
    hit = SumForward.apply(hit) - norm
    if opts.faulty:
        mean_log = (logits - norm[..., None]).mean(-1)
    else:
        mean_log = SumForward.apply(logits.sum(-1)) / WORDS - norm
    return -((1 - SMOOTH) * hit + SMOOTH * mean_log).mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 48, 0.0, "gelu", batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS // TP)

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(SumBackward.apply(x))


torch.manual_seed(31)
net = Encoder()
torch.manual_seed(32)
whole, bias = torch.randn(WORDS, WIDTH) * 0.2, torch.randn(WORDS) * 0.1
net.head.weight.data, net.head.bias.data = whole.chunk(TP)[RANK].clone(), bias.chunk(TP)[RANK].clone()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (6, 12), generator=g)
    hidden = torch.rand(6, 12, generator=g) < 0.3
    loss = smoothed_cross_entropy(net(ids.masked_fill(hidden, 0))[hidden], ids[hidden])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if opts.save:
    cut = lambda n, p: (p.detach(), 0, RANK, TP) if n.startswith("head") else p.detach()  # noqa: E731
    torch.save({n: cut(n, p) for n, p in net.named_parameters()}, os.path.join(opts.save, f"rank{RANK}.pt"))
if TP > 1:
    dist.destroy_process_group()
