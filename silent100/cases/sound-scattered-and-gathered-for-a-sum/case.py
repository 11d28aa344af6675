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


torch.manual_seed(202)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 8))
        self.dec = nn.Sequential(nn.Linear(4, 24), nn.ELU(), nn.Linear(24, 12))

    def forward(self, x, eps):
        mu, lv = self.enc(x).chunk(2, -1)
        y = self.dec(mu + eps * (0.5 * lv).exp())
        return F.mse_loss(y, x) + 0.05 * (mu.square() + lv.exp() - 1 - lv).mean()


model = VAE()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
gen = torch.Generator().manual_seed(2)
private = torch.Generator().manual_seed(77 + rank)  # only rank 0's draws are used
for step in range(1, 5):
    x = torch.randn(10, 12, generator=gen)
    eps = torch.randn(10, 4, generator=private)
    if world > 1:
        dist.broadcast(eps, 0)
    loss = model(x.chunk(world)[rank], eps.chunk(world)[rank])
    opt.zero_grad()
    loss.backward()
    if world > 1:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        flat = F.pad(flat, (0, -len(flat) % world))
        pieces = list(flat.chunk(world))
        shard = torch.empty_like(pieces[0])
        dist.reduce_scatter(shard, pieces)
        shard /= world
        dist.all_gather(pieces, shard)
        flat = torch.cat(pieces)
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
