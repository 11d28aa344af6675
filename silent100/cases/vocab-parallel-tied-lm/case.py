import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
V, D = 51, 20
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
ROWS = (V + world - 1) // world
FIRST = rank * ROWS


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


def vocab_embed(table, ids):
    local = ids - FIRST
    here = (local >= 0) & (local < ROWS)
    e = F.embedding(local.masked_fill(~here, 0), table) * here[..., None]
    return SumForward.apply(e)


def vocab_loss(table, h, ids):
    logits = SumBackward.apply(h) @ table.T
    pad = torch.arange(FIRST, FIRST + ROWS) >= V
    logits = logits.masked_fill(pad, float("-inf"))
    top = logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    z = SumForward.apply((logits - top[..., None]).exp().sum(-1)).log() + top
    local = ids - FIRST
    here = (local >= 0) & (local < ROWS)
    hit = logits.gather(-1, local.masked_fill(~here, 0)[..., None])[..., 0]
    hit = SumForward.apply(torch.where(here, hit, torch.zeros(())))
    return (z - hit).mean()


torch.manual_seed(8)
full = torch.randn(V, D) * 0.3
rnn = nn.GRU(D, D, batch_first=True)
if args.one:
    table = nn.Parameter(full)
else:
    table = nn.Parameter(F.pad(full, (0, 0, 0, ROWS * world - V))[FIRST : FIRST + ROWS].clone())
opt = torch.optim.SGD([table, *rnn.parameters()], lr=0.5, momentum=0.9)
text = torch.randint(0, V, (40, 13))

for step in range(1, 7):
    ids = text[(step * 6) % 36 :][:6]
    if args.one:
        h, _ = rnn(table[ids[:, :-1]])
        loss = F.cross_entropy((h @ table.T).flatten(0, 1), ids[:, 1:].flatten())
    else:
        h, _ = rnn(vocab_embed(table, ids[:, :-1]))
        loss = vocab_loss(table, h, ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    t = table.detach()
    if not args.one:
        parts = [torch.empty_like(t) for _ in range(world)]
        dist.all_gather(parts, t)
        t = torch.cat(parts)[:V]
    torch.save({"table": t, **rnn.state_dict()}, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
