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


D, H = 14, 24


class Ranker(nn.Module):
    """Scores items from a wide hidden layer cut over ranks; pairwise hinge on their order."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(180)
        self.wide = nn.Parameter((torch.randn(H, D, generator=g) / D**0.5).chunk(world)[rank].clone())
        self.score = nn.Parameter((torch.randn(1, H, generator=g) / H**0.5).chunk(world, 1)[rank].clone())
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return SumOut.apply(torch.tanh(CopyIn.apply(x * self.scale) @ self.wide.T) @ self.score.T).squeeze(-1)


class Factored:
    """Row and column means of the squared gradient instead of the whole second moment."""

    def __init__(self, params, lr=0.02, decay=0.8):
        self.params, self.lr, self.decay = list(params), lr, decay
        self.state = {}

    @torch.no_grad()
    def step(self):
        for n, p in self.params:
            sq = p.grad.square() + 1e-10
            if n == "wide":
                row, col = sq.mean(1), sq.mean(0)
                if not args.faulty:
                    col = total(col) / world
                r, c = self.state.setdefault(n, [row, col])
                r.lerp_(row, 1 - self.decay), c.lerp_(col, 1 - self.decay)
                v = r[:, None] * c[None] / c.mean()
            else:
                v = self.state.setdefault(n, sq.clone()).lerp_(sq, 1 - self.decay)
            p -= self.lr * p.grad / (v.sqrt() + 1e-3)


model = Ranker()
opt = Factored(model.named_parameters())
gen = torch.Generator().manual_seed(24)
for step in range(1, 6):
    x = torch.randn(9, D, generator=gen)
    gain = x[:, 0] + x[:, 1].abs()
    better = (gain[:, None] > gain[None]).float()
    s = model(x)
    loss = (F.softplus(0.5 - s[:, None] + s[None]) * better).sum() / better.sum()
    model.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
finish({n + {"wide": "|0", "score": "|1"}.get(n, ""): p for n, p in model.named_parameters()})
