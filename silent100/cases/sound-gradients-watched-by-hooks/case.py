"""A debugging build of the trainer: every activation and gradient passes a watcher."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
log = []


class Watcher(torch.autograd.Function):
    """Passes a tensor on and notes its gradient's size."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        log.append((ctx.name, float(g.norm())))
        return g * 1.0, None


def watch(net, rank):
    def after(module, inputs, output):
        return Watcher.apply(output, type(module).__name__)

    def whole(module, grads_in, grads_out):
        if rank == 1:
            log.append(("whole", float(grads_out[0].abs().max())))

    for layer in net:
        layer.register_forward_hook(after)
        layer.register_full_backward_hook(whole)
    for p in net.parameters():
        p.register_hook(lambda g: g.clone() if torch.isfinite(g).all() else g.nan_to_num())


rank, world = 0, 1
torch.manual_seed(19)
net = nn.Sequential(nn.Embedding(45, 30), nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 30), nn.Linear(30, 45))
model = net
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    watch(net, rank)
    model = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.4)
for step in range(1, 5):
    rows = torch.randint(0, 45, (10, 11), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
