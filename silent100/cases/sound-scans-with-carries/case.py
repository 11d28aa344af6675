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
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(213)
D, T = 8, 16


class Spread(torch.autograd.Function):
    """[..] -> [world, ..] on every rank, with the gradient summed on the way back."""

    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x[None].clone()
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        return total(g)[rank]


class GatedScan(nn.Module):
    """h_t = a_t * h_{t-1} + b_t with input-dependent a; every rank scans its piece from zero,
    then adds the carry that the pieces before it leave."""

    def __init__(self):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(3, D), nn.Linear(3, D), nn.Linear(D, 2)

    def forward(self, x):
        a, b = torch.sigmoid(self.gate(x) + 1), self.inp(x)
        h, hs = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + b[:, t]
            hs.append(h)
        hs, decay = torch.stack(hs, 1), a.cumprod(1)
        edges = Spread.apply(torch.stack([hs[:, -1], decay[:, -1]]))
        carry = 0.0 * edges.sum()  # every rank takes part in the backward of the exchange
        for r in range(rank):
            carry = carry * edges[r, 1] + edges[r, 0]
        carry = carry.expand_as(h)
        return self.out(torch.tanh(hs + decay * carry[:, None]))


model = GatedScan()
opt = torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-3)
gen = torch.Generator().manual_seed(13)
for step in range(1, 5):
    x = torch.randn(6, T, 3, generator=gen)
    y = (x.cumsum(1)[..., 0] > 0).long()
    x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
    # a rank's loss also reaches the others through the carry, so the backward passes run together
    (loss / world).backward()
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
