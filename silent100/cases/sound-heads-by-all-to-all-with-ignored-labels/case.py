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


torch.manual_seed(219)
V, D, H, T = 25, 16, 4, 10


class Turn(torch.autograd.Function):
    """[B, T/w, H, d] -> [B, T, H/w, d], or the other way round."""

    @staticmethod
    def go(x, to_heads):
        if world == 1:
            return x.clone()
        cut, join = (2, 1) if to_heads else (1, 2)
        box = torch.stack([c.contiguous() for c in x.chunk(world, cut)])
        got = torch.empty_like(box)
        dist.all_to_all_single(got, box)
        return torch.cat(got.unbind(), join)

    @staticmethod
    def forward(ctx, x, to_heads):
        ctx.to_heads = to_heads
        return Turn.go(x, to_heads)

    @staticmethod
    def backward(ctx, g):
        return Turn.go(g.contiguous(), not ctx.to_heads), None


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, ids, where):
        x = self.embed(ids) + self.place(where)
        q, k, v = (Turn.apply(t.unflatten(-1, (H, D // H)), True) for t in self.qkv(self.norm(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.proj(Turn.apply(a.transpose(1, 2), False).flatten(2))
        return x @ self.embed.weight.T  # tied output


model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
gen = torch.Generator().manual_seed(19)
for step in range(1, 5):
    ids = torch.randint(0, V, (4, T + 1), generator=gen)
    y = ids[:, 1:].clone()
    y[torch.rand(4, T, generator=gen) < 0.3] = -100  # prompt tokens, unevenly spread
    where = torch.arange(T).chunk(world)[rank]
    logits = model(ids[:, where], where)
    n = (y != -100).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), y[:, where].flatten(), reduction="sum") / n
    opt.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    say(step, total(loss))
finish(dict(model.named_parameters()))
