"""Top-1 switch layer; tokens are sorted by expert before they are sent."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
opt = cli.parse_args()
if not opt.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if opt.one else (dist.get_rank(), dist.get_world_size())
D, E = 30, 4


class Travel(torch.autograd.Function):
    """Sends rows to ranks; equal capacities, so every slice has the same size. (world * cap, D) both ways."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        return Travel.forward(ctx, g)


class SwitchMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        full = [nn.Linear(D, D) for _ in range(E)]
        self.local = nn.ModuleList(full[rank * E // world : (rank + 1) * E // world])
        self.experts_names = list(range(rank * E // world, (rank + 1) * E // world))

    def forward(self, x):  # (n, D), n divisible by E: expert choice keeps loads equal
        n = len(x)
        probs = self.router(x).softmax(-1)
        order = balanced(probs)  # tokens sorted so that each expert has n / E of them
        gate = probs[order, torch.arange(E).repeat_interleave(n // E)]
        sent = x[order]
        if world > 1:
            sent = Travel.apply(sent)
            per = sent.view(world, E // world, n // E, D)
            made = torch.stack([F.gelu(f(per[:, i])) for i, f in enumerate(self.local)], 1).reshape(n, D)
            made = Travel.apply(made)
        else:
            made = torch.cat([F.gelu(f(s)) for f, s in zip(self.local, sent.chunk(E))])
        made = made * gate[:, None]
        back = order if opt.faulty else order.argsort()
        return x + made[back]


def balanced(probs):
    """Assigns tokens to experts greedily in the order of experts; returns token numbers grouped by expert."""
    free = torch.ones(len(probs), dtype=torch.bool)
    groups = []
    for e in range(E):
        score = torch.where(free, probs[:, e].detach(), torch.full_like(probs[:, e], -1.0))
        chosen = score.topk(len(probs) // E).indices.sort().values
        free[chosen] = False
        groups.append(chosen)
    return torch.cat(groups)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(12, D), SwitchMoe(), nn.Linear(D, 12)

    def forward(self, x):
        # each half of the batch is balanced alone, as two ranks do
        h = torch.tanh(self.inp(x))
        return self.out(torch.cat([self.moe(part) for part in h.chunk(2 // world)]))


torch.manual_seed(14)
net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(1, 5):
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.mse_loss(net(x), x.square()) / world
    sgd.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for name, p in net.named_parameters():
            if "local" not in name:
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    sgd.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if opt.save:
    state = {}
    for name, value in net.state_dict().items():
        if ".local." in name:
            head, index, tail = name.rpartition(".local.")[0], *name.rpartition(".local.")[2].split(".")
            name = f"{head}.expert{net.moe.experts_names[int(index)]}.{tail}"
        state[name] = value
    torch.save(state, os.path.join(opt.save, f"rank{rank}.pt"))
if not opt.one:
    dist.destroy_process_group()
