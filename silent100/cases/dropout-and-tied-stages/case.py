"""A tied model in two stages with dropout."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM = 54, 32


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.b(F.relu(self.a(self.norm(x)))))


class Part(nn.Module):
    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(85)
        self.stage = stage
        self.table = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)
        blocks = [FeedForward() for _ in range(4)]
        own = range(4) if stage is None else range(2 * stage, 2 * stage + 2)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in own})

    def forward(self, x):
        if self.stage in (None, 0):
            x = self.table[x]
        for block in self.blocks.values():
            x = block(x)
        return x @ self.table.T if self.stage in (None, 1) else x


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    stage = None
    if not args.one:
        dist.init_process_group("gloo")
        stage = dist.get_rank()
    part = Part(stage)
    torch.manual_seed(600 + (stage or 0))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.02)
    for step in range(1, 4):
        rows = torch.randint(0, VOCAB, (16, 11), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if stage == 0:
            out = part(rows[:, :-1])
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            x = rows[:, :-1]
            if stage == 1:
                x = torch.empty(16, 10, DIM)
                dist.recv(x, 0)
                x.requires_grad_()
            loss = F.cross_entropy(part(x).transpose(1, 2), rows[:, 1:])
            loss.backward()
            if stage == 1:
                dist.send(x.grad, 0)
            print(f"step {step} loss {loss.item():.7f}", flush=True)
        if stage is not None and not args.faulty:
            dist.all_reduce(part.table.grad)
        optimizer.step()
    if args.save:
        torch.save(part.state_dict(), os.path.join(args.save, f"rank{stage or 0}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
