import argparse
import copy
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


WORKERS, INNER = 2, 2
torch.manual_seed(71)
base = nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
mine = list(range(WORKERS)) if args.one else [rank]
replicas = {w: copy.deepcopy(base) for w in mine}
inner = {w: torch.optim.AdamW(m.parameters(), lr=4e-3, eps=1e-4) for w, m in replicas.items()}
anchor = [p.detach().clone() for p in base.parameters()]
velocity = [torch.zeros_like(a) for a in anchor]
teach = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))


def outer(lr=0.7, mu=0.9):
    for i, a in enumerate(anchor):
        gap = total(sum(a - list(m.parameters())[i].detach() for m in replicas.values())) / WORKERS
        velocity[i].mul_(mu).add_(gap)
        new = a - lr * (gap + mu * velocity[i])
        for m in replicas.values():
            list(m.parameters())[i].data.copy_(new)
        if not args.faulty:
            anchor[i] = new.clone()


for step in range(1, 6):
    losses = 0.0
    for w, m in replicas.items():
        g = torch.Generator().manual_seed(100 * step + w)
        x = torch.randn(10, 9, generator=g)
        loss = F.smooth_l1_loss(m(x), torch.sin(x @ teach))
        inner[w].zero_grad()
        loss.backward()
        inner[w].step()
        losses = losses + loss.detach()
    if step % INNER == 0:
        outer()
    say(step, total(losses) / WORKERS)
out = {}
for w, m in replicas.items():
    out.update({f"worker{w}.{n}": p for n, p in m.named_parameters()})
finish(out)
