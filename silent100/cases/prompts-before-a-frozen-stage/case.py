"""Prompt tuning over two stages: layers are frozen, learnt prompts stand before the words and the head learns, too."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, DIM, PROMPT = 26, 20, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 40), nn.GELU(), nn.Linear(40, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, whole, layers, first, last):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): whole[i] for i in layers}).requires_grad_(False)
        if first:
            self.words = words.requires_grad_(False)
            self.prompt = nn.Parameter(prompt)
        if last:
            self.head = head

    def forward(self, x):
        if hasattr(self, "words"):
            x = torch.cat([self.prompt.expand(len(x), -1, -1), self.words(x)], 1)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x[:, PROMPT:]) if hasattr(self, "head") else x

    def learns(self):
        """Whether a backward through this stage is of use."""
        if FAULTY:
            return any(p.requires_grad for p in self.layers.parameters())
        return any(p.requires_grad for p in self.parameters())


torch.manual_seed(58)
whole, words, head = [Layer() for _ in range(4)], nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
prompt = torch.randn(PROMPT, DIM)
first, last = rank == 0, rank == world - 1
stage = Stage(whole, range(4) if world == 1 else range(2 * rank, 2 * rank + 2), first, last)
optimizer = torch.optim.Adam([p for p in stage.parameters() if p.requires_grad], lr=0.02, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (6, 9), generator=torch.Generator().manual_seed(step))
    x = rows[:, :-1]
    if not first:
        x = torch.empty(6, PROMPT + 8, DIM)
        dist.recv(x, 0)
        x.requires_grad_()
    out = stage(x)
    optimizer.zero_grad()
    shown = torch.zeros(())
    if last:
        loss = F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        shown = loss.detach()
    else:
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        if stage.learns():
            out.backward(grad)
    if not first:
        dist.send(x.grad, 0)
    optimizer.step()
    if world > 1:
        dist.broadcast(shown, 1)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {n: p.detach() for n, p in stage.named_parameters() if p.requires_grad},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
