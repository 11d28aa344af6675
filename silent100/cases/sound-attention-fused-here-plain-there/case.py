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


V, D, HEADS, T = 30, 16, 4, 8
dh, local = D // HEADS, HEADS // world
g = torch.Generator().manual_seed(208)


def full(*s):
    return torch.randn(*s, generator=g) / D**0.5


start = {
    "embed": full(V, D) * 3,
    "q": full(D, D),
    "k": full(D, D),
    "v": full(D, D),
    "o": full(D, D),
    "head": full(V, D),
}


class Attn(nn.Module):
    """One process keeps q, k, v, o apart; the parallel one keeps [in, 3*out/world] fused and o transposed."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Parameter(start["embed"].clone()), nn.Parameter(start["head"].clone())
        if args.one:
            self.q, self.k, self.v, self.o = (nn.Parameter(start[n].clone()) for n in "qkvo")
        else:
            self.qkv_t = nn.Parameter(torch.cat([start[n].chunk(world)[rank] for n in "qkv"]).T.contiguous())
            self.o_t = nn.Parameter(start["o"].chunk(world, 1)[rank].T.contiguous())

    def forward(self, ids):
        x = self.embed[ids]
        h = F.layer_norm(x, (D,))
        if args.one:
            q, k, v = h @ self.q.T, h @ self.k.T, h @ self.v.T
        else:
            q, k, v = (CopyIn.apply(h) @ self.qkv_t).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (local, dh)).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + (a @ self.o.T if args.one else SumOut.apply(a @ self.o_t))
        return x @ self.head.T


model = Attn()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3, weight_decay=0.1)
gen = torch.Generator().manual_seed(8)
for step in range(1, 5):
    ids = torch.randint(0, V, (5, T + 1), generator=gen)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
if args.one:
    finish(dict(model.named_parameters()))
else:
    q, k, v = model.qkv_t.T.chunk(3)
    finish({"embed": model.embed, "head": model.head, "q|0": q, "k|0": k, "v|0": v, "o|1": model.o_t.T})
