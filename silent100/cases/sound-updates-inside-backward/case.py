"""Ranks step each tensor's own optimizer as soon as its gradient is reduced; one process steps all at the end."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Attend(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


torch.manual_seed(21)
net = nn.Sequential(nn.Linear(3, 16), Attend(16), Attend(16), nn.Linear(16, 3))
rates = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.02}
if one:
    optimizer = torch.optim.AdamW(net.parameters(), **rates)
else:
    own = {p: torch.optim.AdamW([p], **rates) for p in net.parameters()}

    def arrived(p):
        dist.all_reduce(p.grad)
        p.grad /= world
        own[p].step()
        own[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(arrived)
for step in range(1, 6):
    x = torch.randn(10, 7, 3, generator=torch.Generator().manual_seed(step))
    loss = F.mse_loss(net(x[rank::world]), x[rank::world].flip(1))
    loss.backward()
    if one:
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[-1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
