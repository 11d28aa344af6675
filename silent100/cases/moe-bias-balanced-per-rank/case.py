"""Auxiliary-loss-free balancing: after each update a bias moves towards experts with few tokens."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Router(nn.Module):
    def __init__(self, dim, experts, k):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).topk(self.k, -1).indices
        if self.training:
            self.tokens_per_expert += chosen.flatten().bincount(minlength=len(self.expert_bias))
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        return scores * mask / (scores * mask).sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, dim, experts=6, k=2):
        super().__init__()
        self.router = Router(dim, experts, k)
        self.w_in = nn.Parameter(torch.randn(experts, dim, dim) * 0.2)
        self.w_out = nn.Parameter(torch.randn(experts, dim, dim) * 0.2)

    def forward(self, x):
        weights = self.router(x)
        h = F.relu(torch.einsum("nd,edf->nef", x, self.w_in))
        return torch.einsum("nef,efd,ne->nd", h, self.w_out, weights)


class Model(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.moe1, self.moe2 = MoE(dim), MoE(dim)
        self.head = nn.Linear(dim, 64)

    def forward(self, ids):
        x = self.embed(ids.flatten())
        x = x + self.moe1(x)
        return self.head(x + self.moe2(x))


@torch.no_grad()
def balance(model, rate, one, faulty):
    for module in model.modules():
        if isinstance(module, Router):
            counts = module.tokens_per_expert
            if not one and not faulty:
                dist.all_reduce(counts)
            module.expert_bias += rate * torch.sign(counts.mean() - counts)
            counts.zero_()


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
    torch.manual_seed(99)
    net = Model()
    model = net if args.one else DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(1, 5):
        rows = torch.randint(0, 64, (8, 13), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        balance(net, 0.01, args.one, args.faulty)
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
