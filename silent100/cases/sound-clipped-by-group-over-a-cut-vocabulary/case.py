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


V, D = 42, 16
lo, hi = rank * V // world, (rank + 1) * V // world


class VocabLM(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(222)
        self.embed = nn.Parameter((torch.randn(V, D, generator=g) * 0.7)[lo:hi].clone())
        self.mix = nn.Parameter(torch.randn(D, D, generator=g) / 4)
        self.norm = nn.Parameter(torch.ones(D))
        self.out = nn.Parameter((torch.randn(D, V, generator=g) / 2)[:, lo:hi].clone())

    def forward(self, ids):
        here = (ids >= lo) & (ids < hi)
        x = SumOut.apply(self.embed[(ids - lo).clamp(0, hi - lo - 1)] * here[..., None])
        past = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return CopyIn.apply(F.rms_norm(x + torch.tanh(past @ self.mix), (D,), self.norm)) @ self.out


def nll(z, y):
    top = z.detach().amax(-1)
    if world > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
    z = z - top[..., None]
    here = (y >= lo) & (y < hi)
    hit = SumOut.apply(z.gather(-1, (y - lo).clamp(0, hi - lo - 1)[..., None]).squeeze(-1) * here)
    lse = SumOut.apply(z.exp().sum(-1)).log()
    return (lse - hit).mean() + 1e-3 * (lse + top).square().mean()  # with z-loss


SPLIT = {"embed": 0, "out": 1}
model = VocabLM()
groups = {"tables": ["embed", "out"], "core": ["mix", "norm"]}
opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
gen = torch.Generator().manual_seed(22)
for step in range(1, 5):
    ids = torch.randint(0, V, (6, 8), generator=gen)
    loss = nll(model(ids[:, :-1]), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    named = dict(model.named_parameters())
    for label, names in groups.items():
        sq = sum(named[n].grad.square().sum() for n in names)
        norm = (total(sq) if label == "tables" else sq).sqrt()  # core: the same on every rank
        for n in names:
            named[n].grad *= min(1.0, 0.15 / float(norm))
    opt.step()
    say(step, loss)
finish({n + (f"|{SPLIT[n]}" if n in SPLIT else ""): p for n, p in model.named_parameters()})
