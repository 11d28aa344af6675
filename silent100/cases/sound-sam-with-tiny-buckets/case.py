import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(215)
model = nn.Sequential(nn.Linear(8, 24), nn.Mish(), nn.LayerNorm(24), nn.Linear(24, 6))
net = model if args.one else DDP(model, bucket_cap_mb=0.001)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(15)
RHO = 0.1
for step in range(1, 6):
    x = torch.randn(10, 8, generator=gen)
    y = x[:, :6].argmax(-1).chunk(world)[rank]
    x = x.chunk(world)[rank]
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    moved = [p.grad * (RHO / (norm + 1e-12)) for p in model.parameters()]
    with torch.no_grad():
        for p, e in zip(model.parameters(), moved):
            p += e
    opt.zero_grad()
    F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), moved):
            p -= e
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
