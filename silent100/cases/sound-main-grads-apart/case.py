"""Megatron-style main_grad: autograd's gradients live for a moment only."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Flat:
    def __init__(self, model, world):
        self.parameters, self.world = list(model.parameters()), world
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters))
        pieces = self.buffer.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces):
            p.main_grad = piece.view_as(p)
            p.register_post_accumulate_grad_hook(self.move)

    @staticmethod
    def move(p):
        p.main_grad.add_(p.grad)
        p.grad = None

    @torch.no_grad()
    def reduce(self):
        if self.world > 1:
            dist.all_reduce(self.buffer)
        return self.buffer.norm()

    @torch.no_grad()
    def update(self, lr):
        for p in self.parameters:
            p.sub_(p.main_grad, alpha=lr)
        self.buffer.zero_()


class Gpt(nn.Module):
    def __init__(self, vocab=38, d=24, length=12):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.randn(length, d) * 0.1)
        self.ln, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.lm_head(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
gpt = Gpt()
if args.one:
    sgd = torch.optim.SGD(gpt.parameters(), lr=0.1)
else:
    flat = Flat(gpt, world)
for step in range(1, 6):
    rows = torch.randint(0, 38, (16, 13), generator=torch.Generator().manual_seed(step))
    shown = torch.zeros(())
    pieces = [rows] if args.one else rows[rank::world].chunk(4)
    for piece in pieces:
        loss = F.cross_entropy(gpt(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten()) / (len(pieces) * world)
        loss.backward()
        shown += loss.detach()
    if args.one:
        sgd.step()
        sgd.zero_grad()
    else:
        flat.reduce()
        flat.update(0.1)
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save({k: p.detach() for k, p in gpt.named_parameters()}, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
