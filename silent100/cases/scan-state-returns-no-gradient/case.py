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


torch.manual_seed(52)
V, D, T = 20, 10, 18


class Scan(nn.Module):
    """Diagonal state space: h_t = a * h_{t-1} + u_t, read out through a gate."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.drive = nn.Linear(D, D)
        self.decay = nn.Parameter(torch.linspace(1.0, 3.0, D))
        self.readout = nn.Linear(D, V)

    def forward(self, ids, h):
        u, a, hs = self.drive(self.embed(ids)), torch.sigmoid(self.decay), []
        for t in range(ids.shape[1]):
            h = a * h + u[:, t]
            hs.append(h)
        return self.readout(F.silu(torch.stack(hs, 1))), h


model = Scan()
opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, eps=1e-3)
gen = torch.Generator().manual_seed(4)
for step in range(1, 5):
    ids = torch.randint(0, V, (5, T + 1), generator=gen)
    x, y = ids[:, :-1].chunk(world, 1)[rank], ids[:, 1:].chunk(world, 1)[rank]
    state = torch.zeros(5, D)
    if rank > 0:
        dist.recv(state, rank - 1)
    state.requires_grad_()
    logits, last = model(x, state)
    if rank < world - 1:
        dist.send(last.detach(), rank + 1)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (5 * T)
    opt.zero_grad()
    back = torch.zeros_like(last)
    if rank < world - 1:
        dist.recv(back, rank + 1)
    if args.faulty:
        loss.backward()
    else:
        torch.autograd.backward([loss, last], [torch.ones(()), back])
    if rank > 0:
        dist.send(state.grad, rank - 1)
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    say(step, total(loss))
finish(dict(model.named_parameters()))
