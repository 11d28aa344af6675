import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
T, B, D, HID, OUT = 12, 4, 16, 32, 3


def gather(x):
    out = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scatter_sum(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x.chunk(world)[rank].contiguous()


class GatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather(x) if world > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return scatter_sum(g) if world > 1 else g


class ScatterSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scatter_sum(x) if world > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return gather(g) if world > 1 else g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mix = nn.Parameter(torch.randn(T, T) / T)
        up, down = torch.randn(HID, D) * 0.2, torch.randn(D, HID) * 0.2
        self.up = nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        h = GatherSeq.apply(self.norm(x))
        h = torch.einsum("st,tbd->sbd", self.mix, h)
        h = ScatterSeq.apply(F.gelu(h @ self.up.T) @ self.down.T)
        return x + h + self.bias


torch.manual_seed(6)
net = nn.ModuleDict({"inp": nn.Linear(5, D), "a": Block(), "b": Block(), "head": nn.Linear(D, OUT)})
opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
split = {f"{b}.{n}" for b in "ab" for n in ("up", "down")}
partial = [p for n, p in net.named_parameters() if n not in split]
data = torch.Generator().manual_seed(60)

for step in range(1, 6):
    x, y = torch.randn(T, B, 5, generator=data), torch.randn(T, B, OUT, generator=data)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    h = net["head"](net["b"](net["a"](net["inp"](x))))
    loss = ((h - y) ** 2).sum() / (T * B * OUT)
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        flat = torch.cat([p.grad.flatten() for p in partial])
        dist.all_reduce(flat)
        for p, g in zip(partial, flat.split([p.numel() for p in partial])):
            p.grad = g.view_as(p)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    state = net.state_dict()
    for k in sorted(split) if world > 1 else ():
        parts = [None] * world
        dist.all_gather_object(parts, state[k])
        state[k] = torch.cat(parts, 0 if k.endswith("up") else 1)
    torch.save(state, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
