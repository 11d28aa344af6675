import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


torch.manual_seed(206)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.gate, self.up = nn.Linear(12, 32, bias=False), nn.Linear(12, 32, bias=False)
        self.down = nn.Linear(32, 12)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Mlp(), Mlp())
        self.rank_score = nn.Linear(12, 1)

    def forward(self, x):
        return self.rank_score(self.layers(x)).squeeze(-1)


model = Net()
if not args.one:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
gen = torch.Generator().manual_seed(6)
for step in range(1, 5):
    x = torch.randn(4, 6, 12, generator=gen)  # 4 queries with 6 documents
    gain = (x.sum(-1) / 3).softmax(-1)
    loss = -(gain * model(x).log_softmax(-1)).sum(-1).mean()  # listwise ranking
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
finish({n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()})
