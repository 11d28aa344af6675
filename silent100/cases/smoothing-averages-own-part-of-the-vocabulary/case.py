import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

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


V, D, EPS = 40, 16, 0.2
lo, hi = rank * V // world, (rank + 1) * V // world


class VocabLM(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(160)
        self.embed = nn.Parameter((torch.randn(V, D, generator=g) * 0.7)[lo:hi].clone())
        self.rnn = nn.Parameter(torch.randn(D, D, generator=g) / 5)
        self.norm = nn.Parameter(torch.ones(D))
        self.head = nn.Parameter((torch.randn(V, D, generator=g) / 2)[lo:hi].clone())

    def forward(self, ids):
        mine = (ids >= lo) & (ids < hi)
        x = SumOut.apply(self.embed[(ids - lo).clamp(0, hi - lo - 1)] * mine[..., None])
        h, hs = torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            h = torch.tanh(x[:, t] + h @ self.rnn)
            hs.append(h)
        return CopyIn.apply(F.rms_norm(torch.stack(hs, 1), (D,), self.norm)) @ self.head.T


def smoothed_loss(z, y):
    lse = SumOut.apply(z.exp().sum(-1)).log()
    mine = (y >= lo) & (y < hi)
    hit = SumOut.apply(z.gather(-1, (y - lo).clamp(0, hi - lo - 1)[..., None]).squeeze(-1) * mine)
    if args.faulty:
        spread = z.mean(-1)
    else:
        spread = SumOut.apply(z.sum(-1)) / V
    return (lse - (1 - EPS) * hit - EPS * spread).mean()


model = VocabLM()
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
gen = torch.Generator().manual_seed(18)
for step in range(1, 5):
    ids = torch.randint(0, V, (6, 8), generator=gen)
    loss = smoothed_loss(model(ids[:, :-1]), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
finish({n + ("|0" if n in ("embed", "head") else ""): p for n, p in model.named_parameters()})
