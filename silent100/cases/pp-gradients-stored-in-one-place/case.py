"""Two stages with a small schedule of actions; gradients are sent after all backwards of a pair."""

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
args = cli.parse_args()
D, MICRO = 24, 4


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, D), nn.Linear(D, 40)
        self.lower, self.upper = nn.GRU(D, D, batch_first=True), nn.GRU(D, D, batch_first=True)

    def bottom(self, ids):
        x = self.embed(ids)
        return x + self.lower(x)[0]

    def top(self, x, labels):
        logits = self.head(x + self.upper(x)[0])
        return F.cross_entropy(logits.transpose(1, 2), labels) / MICRO


class Stage:
    """Runs actions F (forward), B (backward) and S (send a gradient back) of microbatches."""

    def __init__(self, lm, rank):
        self.lm, self.rank = lm, rank
        self.inputs, self.outputs, self.back = {}, {}, {}

    def forward(self, i, ids, labels):
        if self.rank == 0:
            self.outputs[i] = self.lm.bottom(ids)
            dist.send(self.outputs[i].detach(), 1)
        else:
            x = torch.empty(*ids.shape, D)
            dist.recv(x, 0)
            self.inputs[i] = x.requires_grad_()
            self.outputs[i] = self.lm.top(x, labels)

    def backward(self, i):
        if self.rank == 0:
            grad = torch.empty_like(self.outputs[i])
            dist.recv(grad, 1)
            self.outputs[i].backward(grad)
        else:
            self.outputs[i].backward()
            self.back["latest" if args.faulty else i] = self.inputs.pop(i).grad

    def send_back(self, i):
        if self.rank == 1:
            dist.send(self.back["latest" if args.faulty else i], 0)

    def run(self, actions, rows):
        for action, i in actions:
            if action == "F":
                self.forward(i, rows[i][:, :-1], rows[i][:, 1:])
            elif action == "B":
                self.backward(i)
            else:
                self.send_back(i)
        return sum(self.outputs[i].detach() for i in range(MICRO)) if self.rank == 1 else None


def actions(rank):
    """Backwards go in pairs on the last stage, whose sends follow."""
    listed = [("F", i) for i in range(MICRO)]
    for i in range(0, MICRO, 2):
        listed += [("B", i), ("B", i + 1)] + [("S", i), ("S", i + 1)]
    return listed


rank = 0
torch.manual_seed(139)
lm = Lm()
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
own = ("embed", "lower") if rank == 0 else ("upper", "head")
parameters = {n: p for n, p in lm.named_parameters() if args.one or n.startswith(own)}
optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
for step in range(1, 5):
    rows = torch.randint(0, 40, (12, 11), generator=torch.Generator().manual_seed(step)).chunk(MICRO)
    optimizer.zero_grad()
    if args.one:
        loss = sum(lm.top(lm.bottom(r[:, :-1]), r[:, 1:]) for r in rows)
        loss.backward()
    else:
        loss = Stage(lm, rank).run(actions(rank), rows)
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save({n: p.detach() for n, p in parameters.items()}, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
