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


V, D, T = 24, 16, 16
torch.manual_seed(31)


class Gather(torch.autograd.Function):
    """Concatenate sequence pieces of every rank; the gradient returns summed."""

    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        return total(g).chunk(world, 1)[rank]


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.head = nn.Linear(D, V)

    def forward(self, ids, where):
        x = self.embed(ids) + self.pos(where)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        k, v = Gather.apply(k), Gather.apply(v)
        ok = where[:, None] >= torch.arange(T)[None]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=ok))
        return self.head(x)


model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
gen = torch.Generator().manual_seed(6)
for step in range(1, 5):
    ids = torch.randint(0, V, (4, T), generator=gen)
    where = torch.arange(T).chunk(world)[rank]
    if args.faulty:
        mine = ids[:, where]
        labels = F.pad(mine[:, 1:], (0, 1), value=-100)
    else:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)[:, where]
    ce = F.cross_entropy(
        model(ids[:, where], where).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    n = total((labels != -100).sum())
    opt.zero_grad()
    (ce / n).backward()
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    say(step, total(ce) / n)
finish(dict(model.named_parameters()))
