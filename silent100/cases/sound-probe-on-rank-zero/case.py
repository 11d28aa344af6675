import argparse
import copy
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


torch.manual_seed(217)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(2, 8, 3), nn.Conv1d(8, 8, 3)
        self.fc = nn.Linear(8, 3)

    def feats(self, x):
        return F.silu(self.conv2(F.silu(self.conv1(x)))).amax(-1)

    def forward(self, x):
        return self.fc(self.feats(x))


model = Net()
z = [p.detach().clone() for p in model.parameters()]  # the fast sequence
avg = [p.detach().clone() for p in model.parameters()]  # the averaged one
if rank == 0:  # for the report: a smoothed copy and a linear probe, trained apart
    smooth = copy.deepcopy(model)
    probe = nn.Linear(8, 3)
    popt = torch.optim.SGD(probe.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(17)
BETA, LR = 0.9, 0.1
for step in range(1, 6):
    x = torch.randn(8, 2, 12, generator=gen)
    y = x[:, 0].argmax(-1) % 3
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    for p, a, b in zip(model.parameters(), z, avg):
        p.data.copy_(b.lerp(a, 1 - BETA))
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    for i, p in enumerate(model.parameters()):
        g = total(p.grad) / world
        z[i] -= LR * (g + 1e-3 * p.detach())
        avg[i].lerp_(z[i], 1 / step)
    if rank == 0:
        with torch.no_grad():
            for s, a in zip(smooth.parameters(), avg):
                s.lerp_(a, 0.1)
        lp = F.cross_entropy(probe(model.feats(x).detach()), y)
        popt.zero_grad()
        lp.backward()
        popt.step()
    say(step, total(loss) / world)
for p, b in zip(model.parameters(), avg):
    p.data.copy_(b)
finish(dict(model.named_parameters()))
