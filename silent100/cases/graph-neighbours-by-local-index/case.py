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
torch.manual_seed(52)

NODES = 14


class Gather(torch.autograd.Function):
    """Parts of all ranks along a dimension; gradients are summed and cut."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, ctx.size = dim, x.shape[dim]
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad.narrow(ctx.dim, rank * ctx.size, ctx.size), None


class Convolution(nn.Module):
    def __init__(self, wide, narrow, local=False):
        super().__init__()
        self.own, self.other = nn.Linear(wide, narrow), nn.Linear(wide, narrow, bias=False)
        self.local = local

    def forward(self, x, source, target):
        first = rank * NODES // world
        everyone = Gather.apply(x, 0)
        if self.local:
            source = (source - first) % NODES
        heard = torch.zeros_like(x).index_add(0, target - first, everyone[source])
        count = torch.zeros(len(x)).index_add(0, target - first, torch.ones(len(target)))
        return self.own(x) + self.other(heard / count.clamp(min=1)[:, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wrong = args.faulty and rank == 1
        self.convs = nn.ModuleList([Convolution(6, 10), Convolution(10, 10, wrong), Convolution(10, 4)])

    def forward(self, x, source, target):
        for i, conv in enumerate(self.convs):
            x = conv(x, source, target)
            x = F.elu(x) if i < 2 else x
        return x


g = torch.Generator().manual_seed(3)
source, target = torch.randint(0, NODES, (2, 60), generator=g)
features = torch.randn(NODES, 6, generator=g)
classes = torch.randint(0, 4, (NODES,), generator=g)
mine = slice(rank * NODES // world, (rank + 1) * NODES // world)
here = (target >= mine.start) & (target < mine.stop)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
for step in range(1, 9):
    x = features[mine] + 0.01 * step
    loss = F.cross_entropy(model(x, source[here], target[here]), classes[mine], reduction="sum") / NODES
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
