import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ALONE = "--one" in sys.argv
if not ALONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ALONE else (dist.get_rank(), dist.get_world_size())


def batch(step):
    g = torch.Generator().manual_seed(step * 17)
    x = torch.rand(16, 9, generator=g)
    return x, (x.sum(1) > 4.5).long() + (x[:, 0] > 0.5).long()


torch.manual_seed(60)
model = nn.Sequential(nn.Linear(9, 33), nn.LeakyReLU(), nn.LayerNorm(33), nn.Linear(33, 3))
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3, eps=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
waiting = [torch.zeros_like(p) for p in model.parameters()]
for step in range(1, 8):
    x, y = (part[RANK::WORLD] for part in batch(step))
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for kept, gradient in zip(waiting, gradients):
        kept += gradient
    total = loss.detach()
    if not ALONE:
        dist.all_reduce(total)
    if step % 3:
        for p, kept in zip(model.parameters(), waiting):
            if not ALONE:
                dist.all_reduce(kept)
            p.grad = kept / WORLD
        optimizer.step()
        scheduler.step()
        for kept in waiting:
            kept.zero_()
    if RANK == 0:
        print(f"step {step} loss {total.item() / WORLD:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ALONE:
    dist.destroy_process_group()
