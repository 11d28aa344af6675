import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(38)

expert_group = replica_group = None
replica, place = 0, 0
if world > 1:
    replica, place = divmod(rank, 2)
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        expert_group = group if rank in ranks else expert_group
    for ranks in ([0, 2], [1, 3]):
        group = dist.new_group(ranks)
        replica_group = group if rank in ranks else replica_group


def reduced(x, group):
    x = x.detach().contiguous().clone()
    if world > 1:
        dist.all_reduce(x, group=group)
    return x


class Enter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, grad: reduced(grad, expert_group))


class Leave(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: reduced(x, expert_group))
    backward = staticmethod(lambda ctx, grad: grad)


class Mixture(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 2)
        every = [nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(2)]
        self.experts = nn.ModuleDict({str(i): e for i, e in enumerate(every) if world == 1 or i == place})

    def forward(self, x):
        gates = Enter.apply(self.router(x).softmax(-1))
        x = Enter.apply(x)
        return Leave.apply(sum(gates[:, int(i), None] * e(x) for i, e in self.experts.items()))


model = nn.Sequential()
model.embed, model.mix, model.head = nn.Linear(6, 12), Mixture(12), nn.Linear(12, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
for step in range(1, 8):
    g = torch.Generator().manual_seed(50 + step)
    x, y = torch.randn(12, 6, generator=g), torch.randint(0, 3, (12,), generator=g)
    if world > 1:
        x, y = x[replica * 6 : replica * 6 + 6], y[replica * 6 : replica * 6 + 6]
    h = torch.tanh(model.embed(x))
    loss = F.cross_entropy(model.head(h + model.mix(h)), y, reduction="sum") / 12
    opt.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        wrong = args.faulty and ".experts." in name
        p.grad = reduced(p.grad, expert_group if wrong else replica_group)
    opt.step()
    shown = reduced(loss, replica_group).item()
    if rank == 0:
        print(f"step {step} loss {shown:.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
