import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
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


torch.manual_seed(225)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x, seeds):
        keep = torch.stack(
            [(torch.rand(2, 32, generator=torch.Generator().manual_seed(int(s))) > 0.2) / 0.8 for s in seeds]
        )
        h = torch.relu(self.a(x)) * keep[:, 0]
        h = h + torch.relu(self.b(h)) * keep[:, 1]
        return self.c(h)


model = Mlp()
net = model if args.one else DDP(model, static_graph=True)
opt = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)
with torch.no_grad():  # warm the caches; ranks do so a different number of times
    for i in range(1 + 2 * rank):
        model(torch.randn(3, 10), torch.arange(3) + i)
gen = torch.Generator().manual_seed(25)
pool = torch.randn(30, 10, generator=gen)
weight = torch.rand(30, generator=gen)
for step in range(1, 6):
    pick = torch.multinomial(weight, 8, replacement=True, generator=gen)  # rows may come twice
    seeds = step * 100 + torch.arange(8)
    pick, seeds = pick[rank::world], seeds[rank::world]
    x = pool[pick]
    loss = F.cross_entropy(net(x, seeds), x[:, :4].argmax(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
