import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

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
        held = {k: v.detach().clone() for k, v in state.items()}
        pieces = {k.partition("|")[0]: (v, int(k.partition("|")[2]), rank, world) for k, v in held.items() if "|" in k}
        torch.save(pieces | {k: v for k, v in held.items() if "|" not in k}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


E, D = 4, 12
mesh = None if args.one else init_device_mesh("cpu", (world,))
mine = range(rank * E // world, (rank + 1) * E // world)


def everyone(x):
    """Tokens of all ranks, in rank order."""
    if args.one:
        return x
    d = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return d.full_tensor() if args.faulty else d.full_tensor(grad_placements=[Partial()])


def back_home(y):
    """Sum what the experts of every rank made and keep the tokens of this rank."""
    if args.one:
        return y
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(170)

        def full(*s):
            return torch.randn(*s, generator=g) / s[-1] ** 0.5

        self.inp, self.router = nn.Parameter(full(D, 6)), nn.Parameter(full(E, D) * 2)
        ins, outs = full(E, 20, D), full(E, D, 20)
        self.w_in = nn.Parameter(ins[list(mine)].clone())
        self.w_out = nn.Parameter(outs[list(mine)].clone())
        self.cls = nn.Parameter(full(3, D))

    def forward(self, x):
        h = torch.tanh(x @ self.inp.T)
        p = (h @ self.router.T).softmax(-1)
        top, where = p.topk(2, -1)
        gate = everyone(torch.zeros_like(p).scatter(-1, where, top))
        seen, y = everyone(h), 0.0
        for i, e in enumerate(mine):
            y = y + gate[:, e : e + 1] * (F.silu(seen @ self.w_in[i].T) @ self.w_out[i].T)
        return (h + back_home(y)) @ self.cls.T


model = Moe()
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
gen = torch.Generator().manual_seed(23)
for step in range(1, 5):
    x = torch.randn(16, 6, generator=gen)
    y = x[:, :3].argmax(-1)
    loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    opt.zero_grad()
    (loss / world).backward()
    for n, p in model.named_parameters():
        if not n.startswith("w_"):
            p.grad = total(p.grad)
    opt.step()
    say(step, total(loss) / world)
finish({n + ("|0" if n.startswith("w_") else ""): p for n, p in model.named_parameters()})
