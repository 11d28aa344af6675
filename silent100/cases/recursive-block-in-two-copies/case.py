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


V, D, MICRO = 28, 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.n2(x))


class Recursive(nn.Module):
    """The same block is applied at every depth; with two stages each one holds a copy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(80)
        embed, block, head = nn.Embedding(V, D), Block(), nn.Linear(D, V)
        self.block = block
        if rank == 0:
            self.embed = embed
        if rank == world - 1:
            self.head = head


model = Recursive()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-3, weight_decay=0.05)
gen = torch.Generator().manual_seed(9)
for step in range(1, 5):
    ids = torch.randint(0, V, (6, 9), generator=gen)
    opt.zero_grad()
    loss_sum, held = torch.zeros(()), []
    for part in ids.chunk(MICRO):
        shape = (len(part), 8, D)
        if rank == 0:
            h = model.block(model.embed(part[:, :-1]))
            if world > 1:
                dist.send(h.detach().contiguous(), 1)
                held.append(h)
                continue
        else:
            h = torch.empty(shape)
            dist.recv(h, 0)
            h.requires_grad_()
        logits = model.head(model.block(model.block(h)))
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / MICRO
        loss.backward()
        loss_sum += loss.detach()
        if rank == 1:
            held.append(h.grad)
    for h in held:
        if rank == 0:
            g = torch.empty_like(h)
            dist.recv(g, 1)
            h.backward(g)
        else:
            dist.send(h.contiguous(), 0)
    if world > 1:
        if not args.faulty:
            for p in model.block.parameters():
                dist.all_reduce(p.grad)
        dist.broadcast(loss_sum, 1)
    opt.step()
    say(step, loss_sum)
finish(dict(model.named_parameters()))
