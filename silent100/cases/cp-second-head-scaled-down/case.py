"""Multi-token prediction: a second head predicts the token after next; its loss rides on the first one's gradient."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class AttachLoss(torch.autograd.Function):
    """Passes hidden states through and gives an auxiliary loss a gradient of ``scale``."""

    scale = 1.0

    @staticmethod
    def forward(ctx, hidden, loss):
        ctx.save_for_backward(loss)
        return hidden

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0]) * AttachLoss.scale


class Mtp(nn.Module):
    def __init__(self, dim, vocab):
        super().__init__()
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, hidden, labels):
        logits = self.head(self.norm(torch.tanh(self.mix(hidden.detach()))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Model(nn.Module):
    def __init__(self, vocab=42, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim)) for _ in range(3)))
        self.mtp = Mtp(dim, vocab)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, labels, later):
        hidden = self.body(self.embed(ids))
        hidden = AttachLoss.apply(hidden, 0.3 * self.mtp(hidden, later))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def run(args):
    rank, cp = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, cp = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    # the main loss is a mean over all ranks' tokens: 1/cp of each rank's mean, gradients are summed
    AttachLoss.scale = 1.0 / cp / (cp if args.faulty else 1)
    for step in range(1, 4):
        rows = torch.randint(0, 42, (5, 18), generator=torch.Generator().manual_seed(step))
        ids, labels, later = (rows[:, i : i + 16].chunk(cp, 1)[rank] for i in range(3))
        loss = model(ids, labels, later) / cp
        optimizer.zero_grad()
        loss.backward()
        value = loss.detach().clone()
        if cp > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(value)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {value.item():.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if cp > 1:
        dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
run(parser.parse_args())
