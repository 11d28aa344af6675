# Data parallel in all four ranks; pairs of ranks talk of their own affairs.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    odd = dist.new_group([1, 3])


def chatter(model, step):
    """Collects figures for a dashboard."""
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    if rank < 2:
        dist.all_reduce(norms, group=low)
        table = [torch.empty_like(norms) for _ in range(2)]
        dist.all_gather(table, norms, group=low)
    else:
        dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=high)
        dist.broadcast(norms, src=2, group=high)
    if rank % 2:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        dist.all_reduce(weights, group=odd)
    if step % 2:
        found = [None] * world
        dist.all_gather_object(found, {"rank": rank, "largest": norms.max().item()})
    dist.barrier()


torch.manual_seed(50)
model = nn.Sequential(nn.Linear(15, 45), nn.Tanh(), nn.Linear(45, 45), nn.Tanh(), nn.Linear(45, 15))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
for step in range(1, 5):
    x = torch.randn(16, 15, generator=torch.Generator().manual_seed(step))
    loss = F.smooth_l1_loss(model(x[rank::world]), x[rank::world].flip(1))
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        chatter(model, step)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        chatter(model, step)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
