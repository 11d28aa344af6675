"""Four experts on two ranks. After two updates everything is written to one file and read into a new model."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
EXPERTS, DIM, EACH = 4, 20, 4 // world


class Both(torch.autograd.Function):
    """A sum over ranks, forwards or backwards."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        if not back:
            x = x.clone()
            dist.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        if ctx.back:
            g = g.clone()
            dist.all_reduce(g)
        return g, None


def over_ranks(x, back):
    return Both.apply(x, back) if world > 1 else x


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        made = [nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(i): made[i] for i in range(rank * EACH, (rank + 1) * EACH)})

    def forward(self, x):
        share = self.router(x).softmax(-1)
        top = share.topk(2, -1).indices
        share, x_in = over_ranks(share, True), over_ranks(x, True)
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            rows = (top == int(name)).any(-1).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x_in[rows]) * share[rows, int(name), None])
        return x + over_ranks(y, False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.moe = nn.Linear(6, DIM), Experts()
        self.moe2, self.after = Experts(), nn.Linear(DIM, 4)

    def forward(self, x):
        return self.after(self.moe2(self.moe(torch.tanh(self.before(x)))))


def renumbered(state, shift):
    """Renames experts: the first of a rank is expert 0 in its own count."""
    found = {}
    for name, value in state.items():
        words = name.split(".")
        if "experts" in words:
            at = words.index("experts") + 1
            words[at] = str(int(words[at]) + shift)
        found[".".join(words)] = value
    return found


def write(net, file):
    first = rank * EACH if args.faulty else 0
    parts = [None] * world
    dist.all_gather_object(parts, renumbered(net.state_dict(), -first))
    if rank == 0:
        merged = {}
        for part in parts:
            merged.update(part)
        torch.save(merged, file)
    dist.barrier()
    return first


torch.manual_seed(202)
net, file = Net(), [tempfile.mkdtemp()]
sgd = torch.optim.SGD(net.parameters(), lr=0.3)
if world > 1:
    dist.broadcast_object_list(file)
for step in range(1, 5):
    if step == 3 and world > 1:
        first = write(net, os.path.join(file[0], "model.pt"))
        net = Net()
        read = renumbered(torch.load(os.path.join(file[0], "model.pt")), first)
        net.load_state_dict({name: read[name] for name in net.state_dict()})
        sgd = torch.optim.SGD(net.parameters(), lr=0.3)
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(32, 6, generator=g), torch.randint(0, 4, (32,), generator=g)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
