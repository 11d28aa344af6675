import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

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
        held = {k: v.detach().clone() for k, v in state.items()}
        pieces = {k.partition("|")[0]: (v, int(k.partition("|")[2]), rank, world) for k, v in held.items() if "|" in k}
        torch.save(pieces | {k: v for k, v in held.items() if "|" not in k}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return total(g)


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, g):
        return g


D, H = 12, 32


class FakeQuant(torch.autograd.Function):
    """Eight-bit rounding with a straight-through gradient; one scale for the whole (split) matrix."""

    @staticmethod
    def forward(ctx, w):
        top = w.abs().max()
        if world > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
        s = top / 127
        return (w / s).round() * s

    @staticmethod
    def backward(ctx, g):
        return g


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(226)
        self.up = nn.Parameter((torch.randn(H, D, generator=g) / D**0.5).chunk(world)[rank].clone())
        self.down = nn.Parameter((torch.randn(D, H, generator=g) / H**0.5).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        h = F.hardswish(CopyIn.apply(x) @ FakeQuant.apply(self.up).T)
        return x + SumOut.apply(h @ FakeQuant.apply(self.down).T) + self.bias


torch.set_default_dtype(torch.float64)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
gen = torch.Generator().manual_seed(26)
for step in range(1, 5):
    x = torch.randn(16, D, generator=gen)
    loss = F.smooth_l1_loss(model(x), x.sort(-1)[0])
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
finish({n + {"up": "|0", "down": "|1"}.get(n, ""): p for n, p in model.named_parameters()})
