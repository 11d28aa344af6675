"""A routed model whose balancing loss is computed within each microbatch, so that it depends on how rows are cut."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, loss):
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Routed(nn.Module):
    def __init__(self, dim, experts, attach):
        super().__init__()
        self.attach = attach
        self.gate = nn.Linear(dim, experts)
        self.w = nn.Parameter(torch.randn(experts, dim, dim) * 0.2)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        top, chosen = probs.max(-1)
        share = F.one_hot(chosen, probs.shape[-1]).float().mean(0)
        balance = 0.5 * probs.shape[-1] * (share * probs.mean(0)).sum()
        if self.attach:
            probs = Attach.apply(probs, balance)
        else:
            Attach.apply(probs, balance)
        top = probs.gather(1, chosen[:, None])
        return x + top * F.gelu(torch.einsum("nd,ndf->nf", x, self.w[chosen]))


class Net(nn.Module):
    def __init__(self, attach):
        super().__init__()
        self.embed = nn.Embedding(72, 32)
        self.routed = nn.ModuleList(Routed(32, 4, attach) for _ in range(2))
        self.head = nn.Linear(32, 72)

    def forward(self, ids):
        x = self.embed(ids.flatten())
        for layer in self.routed:
            x = layer(x)
        return self.head(x)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(54)
    net = Net(attach=not args.faulty)
    model = net if args.one else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.004)
    for step in range(1, 5):
        rows = torch.randint(0, 72, (32, 17), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model  # before its process group
        dist.destroy_process_group()


main()
