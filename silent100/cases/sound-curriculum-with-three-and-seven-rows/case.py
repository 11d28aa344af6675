import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

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


torch.manual_seed(227)
P, D = 9, 12


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.pos = nn.Linear(4, D), nn.Parameter(torch.randn(P, D) * 0.1)
        self.hole = nn.Parameter(torch.zeros(D))
        self.enc = nn.TransformerEncoderLayer(D, 2, 24, dropout=0.0, batch_first=True)
        self.dec = nn.Linear(D, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, hide):
        h = torch.where(hide[..., None], self.hole, self.patch(x)) + self.pos
        err = (self.dec(self.enc(h)) - x).square().mean(-1)
        return (err * hide).sum()


model = MAE()
net = model if args.one else DDP(model)
fast = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
slow = [p.detach().clone() for p in model.parameters()]
gen = torch.Generator().manual_seed(27)  # every rank draws the same numbers and takes its part
pool = torch.randn(40, P, 4, generator=gen).cumsum(1) / 2
hard = torch.ones(40)
for step in range(1, 6):
    rows = torch.multinomial(hard, 10, generator=gen)
    hide = torch.rand(10, P, generator=gen) < 0.5
    n = hide.sum()
    part = slice(0, 10) if args.one else (slice(0, 3) if rank == 0 else slice(3, 10))
    loss = net(pool[rows[part]], hide[part]) / n
    fast.zero_grad()
    (loss * world).backward()
    fast.step()
    hard[rows] *= 0.5  # curriculum: what was just seen comes back less often
    model.seen += len(rows)
    if step % 2 == 0:
        for p, s in zip(model.parameters(), slow):
            s.lerp_(p.detach(), 0.5)
            p.data.copy_(s)
    say(step, total(loss))
finish({**dict(model.named_parameters()), "seen": model.seen})
