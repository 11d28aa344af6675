import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

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


E, D = 4, 10
El = E // world


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.clone()
        out = torch.empty(x.shape)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        return Swap.forward(None, g)


class TopTwo(nn.Module):
    """Router weights start at zero: every token ties and the lowest expert numbers win."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(212)
        self.router = nn.Parameter(torch.zeros(E, D))
        self.expert = nn.ParameterList(nn.Parameter(torch.randn(D, D, generator=g) * 0.3) for _ in range(E))
        if world > 1:
            self.expert = nn.ParameterDict({f"e{rank * El + i}": self.expert[rank * El + i] for i in range(El)})
        else:
            self.expert = nn.ParameterDict({f"e{i}": p for i, p in enumerate(self.expert)})

    def forward(self, x):
        p = (x @ self.router.T).softmax(-1)
        order = torch.sort(p.detach() - 1e-4 * torch.arange(E), stable=True, descending=True)[1][:, :2]
        gate = torch.zeros_like(p).scatter(-1, order, p.gather(-1, order))
        inbox = Swap.apply(x.expand(world, *x.shape))
        gate = Swap.apply(gate.view(len(x), world, El).transpose(0, 1))
        y = sum(gate[..., i : i + 1] * torch.tanh(inbox @ w) for i, w in enumerate(self.expert.values()))
        load = total(p.sum(0)) / (len(x) * world)  # statistics over the whole batch
        return x + Swap.apply(y).sum(0), (load * p.mean(0)).sum() * E


model = TopTwo()
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
gen = torch.Generator().manual_seed(12)
for step in range(1, 5):
    x = torch.randn(24, D, generator=gen).chunk(world)[rank]
    y, balance = model(x)
    loss = (y - x.roll(1, -1)).square().mean() + 0.01 * balance
    opt.zero_grad()
    loss.backward()
    model.router.grad = total(model.router.grad) / world
    for p in model.expert.values():  # tokens of all ranks already met here
        p.grad = (torch.zeros_like(p) if p.grad is None else p.grad) / world
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
