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


V, D, H = 40, 16, 48


class SwiGLULM(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(11)

        def full(*s):
            return torch.randn(*s, generator=g) / s[-1] ** 0.5

        def part(w, d):
            return nn.Parameter(w.chunk(world, d)[rank].clone())

        self.embed = nn.Parameter(full(V, D))
        self.norm = nn.Parameter(torch.ones(D))
        self.gate, self.up = part(full(H, D), 0), part(full(H, D), 0)
        self.down = part(full(D, H), 1)
        self.head = nn.Parameter(full(V, D))

    def forward(self, ids):
        x = self.embed[ids]
        h = CopyIn.apply(F.rms_norm(x, (D,), self.norm))
        x = x + SumOut.apply((F.silu(h @ self.gate.T) * (h @ self.up.T)) @ self.down.T)
        return x @ self.head.T


SPLIT = {"gate": 0, "up": 0, "down": 1}
model = SwiGLULM()
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
gen = torch.Generator().manual_seed(5)
for step in range(1, 5):
    ids = torch.randint(0, V, (6, 9), generator=gen)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    sharded = sum(p.grad.square().sum() for n, p in model.named_parameters() if n in SPLIT)
    whole = sum(p.grad.square().sum() for n, p in model.named_parameters() if n not in SPLIT)
    if args.faulty:
        norm = total(sharded + whole).sqrt()
    else:
        norm = (total(sharded) + whole).sqrt()
    coef = min(1.0, 0.4 / float(norm))
    for p in model.parameters():
        p.grad.mul_(coef)
    opt.step()
    say(step, loss)
finish({f"{n}|{SPLIT[n]}" if n in SPLIT else n: p for n, p in model.named_parameters()})
