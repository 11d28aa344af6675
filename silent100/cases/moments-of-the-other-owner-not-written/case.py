import argparse
import os
import tempfile

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
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.set_default_dtype(torch.float64)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mid = nn.Linear(14, 20), nn.Linear(20, 6)
        self.back, self.out = nn.Linear(6, 20), nn.Linear(20, 14)

    def forward(self, x):
        return self.out(F.silu(self.back(torch.tanh(self.mid(F.silu(self.enc(x)))))))


class ShardedLion:
    """Every rank keeps the moments of the layers it owns and sends out what it updated."""

    def __init__(self, model, lr=2e-3, b1=0.9, b2=0.98):
        self.named = list(model.named_parameters())
        self.lr, self.b1, self.b2 = lr, b1, b2
        self.owner = {n: i // 2 % world for i, (n, _) in enumerate(self.named)}
        self.m = {n: torch.zeros_like(p) for n, p in self.named if self.owner[n] == rank}

    @torch.no_grad()
    def step(self):
        for n, p in self.named:
            if self.owner[n] == rank:
                p -= self.lr * ((self.b1 * self.m[n] + (1 - self.b1) * p.grad).sign() + 0.01 * p)
                self.m[n].mul_(self.b2).add_(p.grad, alpha=1 - self.b2)
            if world > 1:
                dist.broadcast(p.data, self.owner[n])

    def collect(self):
        if args.faulty or world == 1:
            return dict(self.m)
        got = [None] * world if rank == 0 else None
        dist.gather_object(self.m, got)
        return {k: v for part in got for k, v in part.items()} if rank == 0 else None

    def restore(self, m):
        for n in self.m:
            if n in m:
                self.m[n].copy_(m[n])


def build():
    torch.manual_seed(17)
    model = AutoEncoder()
    return model, ShardedLion(model)


folder = [tempfile.mkdtemp() if rank == 0 else None]
if world > 1:
    dist.broadcast_object_list(folder)
model, opt = build()
gen = torch.Generator().manual_seed(10)
for step in range(1, 6):
    x = torch.randn(8, 14, generator=gen).chunk(world)[rank]
    loss = (model(x) - x).square().mean()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad = total(p.grad) / world
    opt.step()
    say(step, total(loss) / world)
    if step == 3:
        moments = opt.collect()
        if rank == 0:
            torch.save({"model": model.state_dict(), "moments": moments}, folder[0] + "/last.pt")
        if world > 1:
            dist.barrier()
        model, opt = build()
        ck = torch.load(folder[0] + "/last.pt")
        model.load_state_dict(ck["model"])
        opt.restore(ck["moments"])
finish(dict(model.named_parameters()))
