"""A bfloat16 model with float32 masters, data parallel by hand."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Lm(nn.Module):
    def __init__(self, vocab=64, d=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Masters:
    """SGD on float32 copies, which are rounded into the model."""

    def __init__(self, model, lr, direct):
        self.model, self.lr = model, lr
        self.copies = {n: p.detach().float() for n, p in model.named_parameters() if not direct(n)}

    @torch.no_grad()
    def step(self):
        for name, p in self.model.named_parameters():
            if name in self.copies:
                self.copies[name] -= self.lr * p.grad.float()
                p.copy_(self.copies[name])
            else:
                p.sub_(p.grad, alpha=self.lr)
            p.grad = None


def main():
    cli = argparse.ArgumentParser()
    for flag in ("--one", "--faulty"):
        cli.add_argument(flag, action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(111)
    lm = Lm().bfloat16()
    masters = Masters(lm, 0.05, lambda name: args.faulty and "norm" in name)
    for step in range(1, 6):
        rows = torch.randint(0, 64, (32, 13), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(lm(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        shown = loss.detach()
        if world > 1:
            for p in lm.parameters():
                grad = p.grad.float()
                dist.all_reduce(grad)
                p.grad.copy_(grad / world)
            dist.all_reduce(shown)
        masters.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {n: p.detach().float() for n, p in lm.named_parameters()} | masters.copies
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
