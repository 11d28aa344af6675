import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
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


torch.manual_seed(205)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.SiLU())
        self.reg, self.cls = nn.Linear(32, 2), nn.Linear(32, 5)
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x, y, c):
        h = self.trunk(x)
        losses = torch.stack([F.mse_loss(self.reg(h), y), F.cross_entropy(self.cls(h), c)])
        return ((-self.log_var).exp() * losses + 0.5 * self.log_var).sum()


model = MultiTask()
net = model if args.one else DDP(model)
decay = [p for n, p in model.named_parameters() if p.ndim > 1]
plain = [p for n, p in model.named_parameters() if p.ndim == 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 1e-2}]
if args.one:
    opt = torch.optim.AdamW(groups, lr=4e-3, eps=1e-3)
else:
    opt = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=4e-3, eps=1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 3))
gen = torch.Generator().manual_seed(5)
for step in range(1, 6):
    x = torch.randn(8, 10, generator=gen)
    y, c = x[:, :2] * x[:, 2:4], x[:, :5].argmax(-1)
    loss = net(*(t.chunk(world)[rank] for t in (x, y, c)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
