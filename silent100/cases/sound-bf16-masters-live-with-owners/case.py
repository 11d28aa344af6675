"""Weights in bfloat16, masters in float32, shared out layer by layer."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(167)
model = nn.Sequential(
    nn.Embedding(30, 32), nn.Flatten(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 30)
)
start = {name: p.detach().clone() for name, p in model.named_parameters()}
model.bfloat16()
owner = {name: i % world for i, name in enumerate(start)}
masters = {name: nn.Parameter(p) for name, p in start.items() if owner[name] == rank}
optimizer = torch.optim.AdamW(masters.values(), lr=2e-3, eps=1e-4)
for step in range(1, 5):
    words = torch.randint(0, 30, (16, 4), generator=torch.Generator().manual_seed(step))
    labels = words.amax(1)
    logits = model(words[rank::world]).float()
    loss = nn.functional.cross_entropy(logits, labels[rank::world], reduction="sum") / 16
    model.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    for name, p in model.named_parameters():
        grad = p.grad.float()
        if world > 1:
            dist.reduce(grad, owner[name])
        if owner[name] == rank:
            masters[name].grad = grad
    optimizer.step()
    for name, p in model.named_parameters():
        if owner[name] == rank:
            p.data.copy_(masters[name].detach())
        if world > 1:
            dist.broadcast(p.data, owner[name])
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {name: p.detach() for name, p in masters.items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
