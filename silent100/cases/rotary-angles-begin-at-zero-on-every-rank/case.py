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
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


V, D, T = 26, 16, 12
torch.manual_seed(101)


class Pass(torch.autograd.Function):
    """Hand a block to the next rank; its gradient comes back from there."""

    @staticmethod
    def move(x, hop):
        out = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x.contiguous(), (rank + hop) % world),
            dist.P2POp(dist.irecv, out, (rank - hop) % world),
        ]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        return out

    @staticmethod
    def forward(ctx, x):
        return Pass.move(x.detach(), 1)

    @staticmethod
    def backward(ctx, g):
        return Pass.move(g, -1)


def rotate(x, where):
    f = where[:, None] / 50 ** (torch.arange(D // 2) * 2 / D)
    a, b = x.chunk(2, -1)
    return torch.cat([a * f.cos() - b * f.sin(), a * f.sin() + b * f.cos()], -1)


class RingLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(V, D), nn.RMSNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        n = ids.shape[1]
        x = self.embed(ids)
        h = self.norm(x)
        start = rank * n
        angle = torch.arange(n) + (0 if args.faulty else start)
        q, kv = rotate(self.q(h) * 2, angle), torch.cat([rotate(self.k(h) * 2, angle), self.v(h)], -1)
        num, den = 0.0, 0.0
        for hop in range(world):
            src = (rank - hop) % world
            k, v = kv.split(D, -1)
            ok = (start + torch.arange(n))[:, None] >= (src * n + torch.arange(n))[None]
            w = (q @ k.transpose(1, 2) / D**0.5).exp() * ok
            num, den = num + w @ v, den + w.sum(-1, keepdim=True)
            if hop < world - 1:
                kv = Pass.apply(kv)
        return self.head(x + self.o(num / den))


model = RingLM()
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
gen = torch.Generator().manual_seed(7)
for step in range(1, 5):
    ids = torch.randint(0, V, (6, T + 1), generator=gen)
    x, y = ids[:, :-1].chunk(world, 1)[rank], ids[:, 1:].chunk(world, 1)[rank]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad = total(p.grad) / world
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
