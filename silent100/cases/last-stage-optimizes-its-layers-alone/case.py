"""A language model on two stages with microbatches sent forward and gradients sent back by hand."""

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

VOCAB, DIM, LENGTH, MICRO = 32, 24, 10, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)


torch.manual_seed(5)
lm = Lm()
if world > 1:
    for i in range(4):
        if i // 2 != rank:
            del lm.layers[str(i)]
    for name in ("norm", "head") if rank == 0 else ("embed",):
        delattr(lm, name)
first, last = rank == 0, rank == world - 1
own = [*lm.layers.parameters()]
if first:
    own += [*lm.embed.parameters()]
if last:
    own += [*lm.head.parameters()]
    if not FAULTY:
        own += [*lm.norm.parameters()]
optimizer = torch.optim.AdamW(own, lr=4e-3, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    entered, left, shown = [], [], torch.zeros(())
    for piece in rows.chunk(MICRO):
        if first:
            x = lm.embed(piece[:, :-1])
        else:
            x = torch.empty(len(piece), LENGTH, DIM)
            dist.recv(x, 0)
            x.requires_grad_()
        entered.append(x)
        for layer in lm.layers.values():
            x = layer(x)
        if last:
            x = F.cross_entropy(lm.head(lm.norm(x)).flatten(0, 1), piece[:, 1:].flatten()) / MICRO
            shown += x.detach()
        else:
            dist.send(x.detach(), 1)
        left.append(x)
    for x, y in zip(entered, left):
        grad = None
        if not last:
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
        y.backward(grad)
        if not first:
            dist.send(x.grad, 0)
    optimizer.step()
    lm.zero_grad()
    if world > 1:
        dist.broadcast(shown, 1)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
