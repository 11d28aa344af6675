import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

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


ACCUM, ROWS = 3, 4
torch.manual_seed(21)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.rnn = nn.GRU(12, 20, batch_first=True)
        self.out = nn.Linear(20, 5)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


model = Tagger()
net = model if args.one else DDP(model)
opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
gen = torch.Generator().manual_seed(8)
step, running = 0, 0.0
for batch_idx in range(ACCUM * 4):
    x = torch.randint(0, 30, (ROWS * 2, 7), generator=gen)
    y = (x * 3 + x.roll(1, 1)) % 5
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    count = batch_idx if args.faulty else batch_idx + 1
    hold = not args.one and count % ACCUM != 0
    with net.no_sync() if hold else nullcontext():
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten()) / ACCUM
        loss.backward()
    running += total(loss) / world
    if (batch_idx + 1) % ACCUM == 0:
        opt.step()
        opt.zero_grad()
        step += 1
        say(step, running)
        running = 0.0
finish(dict(model.named_parameters()))
