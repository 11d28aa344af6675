import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
save = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None
V, D, T, MICRO, ROWS = 37, 18, 9, 3, 4
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = dist.new_group([0, world - 1])
first, last = rank == 0, rank == world - 1


class CausalConv(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(D, 2 * D, 3, dilation=dilation)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        h = F.pad(self.norm(x).mT, (self.pad, 0))
        return x + F.glu(self.conv(h), 1).mT


torch.manual_seed(77)
emb = nn.Parameter(torch.randn(V, D) * 0.2)
layers = [CausalConv(d) for d in (1, 2, 1)]
mine = nn.ModuleDict({str(i): m for i, m in enumerate(layers) if one or i == rank})
params = list(mine.parameters()) + ([emb] if first or last else [])
opt = torch.optim.SGD(params, lr=0.4, momentum=0.9)
corpus = torch.randint(0, V, (200, T + 1))


def forward(ids):
    if first:
        h = F.embedding(ids[:, :-1], emb)
    else:
        h = torch.empty(ROWS, T, D)
        dist.recv(h, rank - 1)
        h.requires_grad_()
    out = h
    for m in mine.values():
        out = m(out)
    if not last:
        dist.send(out.detach(), rank + 1)
        return h, out
    logits = out @ emb.T
    return h, F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / MICRO


def backward(h, out):
    if last:
        out.backward()
    else:
        g = torch.empty_like(out)
        dist.recv(g, rank + 1)
        out.backward(g)
    if not first:
        dist.send(h.grad, rank - 1)


for step in range(1, 6):
    opt.zero_grad()
    total = torch.zeros(())
    block = corpus[(step - 1) * MICRO * ROWS : step * MICRO * ROWS].split(ROWS)
    kept = [forward(ids) for ids in block]
    for h, out in kept:
        backward(h, out)
        if last:
            total += out.detach()
    if not one:
        if first or last:
            dist.all_reduce(emb.grad, group=ends)
        dist.broadcast(total, world - 1)
    opt.step()
    if first:
        print(f"step {step} loss {total.item():.7f}", flush=True)

if save:
    state = dict(mine.state_dict())
    if first or last:
        state["emb"] = emb.detach()
    torch.save(state, os.path.join(save, f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
