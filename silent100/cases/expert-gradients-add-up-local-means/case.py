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
        held = {k: v.detach().clone() for k, v in state.items()}
        pieces = {k.partition("|")[0]: (v, int(k.partition("|")[2]), rank, world) for k, v in held.items() if "|" in k}
        torch.save(pieces | {k: v for k, v in held.items() if "|" not in k}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


E, D, T = 4, 12, 20
El = E // world


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x).contiguous()
        if world == 1:
            return x.clone()
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        return Swap.forward(None, g)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(9)
        w1, w2 = torch.randn(E, 24, D, generator=g) * 0.3, torch.randn(E, D, 24, generator=g) * 0.2
        self.router = nn.Parameter(torch.randn(E, D, generator=g) * 0.5)
        self.expert_in = nn.Parameter(w1.chunk(world)[rank].clone())
        self.expert_out = nn.Parameter(w2.chunk(world)[rank].clone())
        self.readout = nn.Parameter(torch.randn(D, D, generator=g) * 0.2)

    def forward(self, x):
        p = (x @ self.router.T).softmax(-1)
        top, where = p.topk(2, -1)
        gate = torch.zeros_like(p).scatter(-1, where, top / top.sum(-1, keepdim=True))
        sent = Swap.apply(x.expand(world, *x.shape))
        gate = Swap.apply(gate.view(len(x), world, El).transpose(0, 1))
        y = 0
        for e in range(El):
            y = y + gate[..., e : e + 1] * (F.gelu(sent @ self.expert_in[e].T) @ self.expert_out[e].T)
        return (x + Swap.apply(y).sum(0)) @ self.readout.T


model = Layer()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
gen = torch.Generator().manual_seed(12)
mix = torch.randn(D, D, generator=gen) / 3
for step in range(1, 5):
    x = torch.randn(2 * T, D, generator=gen)
    x = x.chunk(world)[rank]
    loss = (model(x) - torch.tanh(x @ mix)).square().mean()
    opt.zero_grad()
    loss.backward()
    for n, p in model.named_parameters():
        if n.startswith("expert"):
            if not args.faulty:
                p.grad /= world
        else:
            p.grad = total(p.grad) / world
    opt.step()
    say(step, total(loss) / world)
finish({n + ("|0" if n.startswith("expert") else ""): p for n, p in model.named_parameters()})
