import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

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


torch.manual_seed(211)
bar = torch.cos(torch.linspace(0, 1.5, 50)) ** 2


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inp = nn.Conv1d(2, 16, 3, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv1d(16, 16, 3, padding=1))
        self.out = nn.Conv1d(16, 2, 3, padding=1)

    def forward(self, x, t):
        f = t[:, None] / 10 ** torch.arange(4)
        e = self.time(torch.cat([f.sin(), f.cos()], -1))
        h = self.inp(x) + e[..., None]
        # recomputed in the distributed run, kept in the other
        h = h + (self.mid(h) if args.one else checkpoint(self.mid, h, use_reentrant=False))
        return self.out(h)


model = Denoiser()
net = model if args.one else DDP(model)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
data = torch.randn(64, 2, 12, generator=torch.Generator().manual_seed(11)).cumsum(-1) / 3


def corrupt(i, step):
    g = torch.Generator().manual_seed(step * 1000 + i)  # a stream for every sample
    t = torch.randint(0, 50, (), generator=g)
    return t, torch.randn(2, 12, generator=g)


for step in range(1, 5):
    ids = [(step * 13 + 5 * j) % 64 for j in range(8)][rank::world]
    t, noise = (torch.stack(z) for z in zip(*(corrupt(i, step) for i in ids)))
    a = bar[t][:, None, None]
    loss = F.mse_loss(net(a.sqrt() * data[ids] + (1 - a).sqrt() * noise, t.float()), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
