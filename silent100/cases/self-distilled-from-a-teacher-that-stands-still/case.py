import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
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


torch.manual_seed(40)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 12, 3, padding=1)
        self.mix = nn.Conv1d(12, 12, 3, padding=1)
        self.proj = nn.Linear(12, 8)

    def forward(self, x):
        return self.proj(F.gelu(self.mix(F.gelu(self.conv(x)))).mean(-1))


class Distill(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, keep=0.5):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.mul_(keep).add_(s, alpha=1 - keep)


model = Distill()
student = model.student if args.one else DDP(model.student)
opt = torch.optim.SGD(model.student.parameters(), lr=0.3, momentum=0.9)
gen = torch.Generator().manual_seed(19)
for step in range(1, 6):
    x = torch.randn(8, 3, 16, generator=gen)
    view = x + 0.5 * torch.randn(8, 3, 16, generator=gen)
    x, view = x.chunk(world)[rank], view.chunk(world)[rank]
    target = (model.teacher(x) * 4).softmax(-1)
    loss = -(target * student(view).log_softmax(-1)).sum(-1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 or not args.faulty:
        model.follow()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
