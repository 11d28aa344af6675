"""Recurrent layers as a pipeline over time: microbatches are pieces of the sequence, a state goes through them."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
rank = 0
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
UNITS, PIECE = 12, 3


class Below(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 8), nn.GRU(8, UNITS, batch_first=True)

    def forward(self, ids, state=None):
        return self.rnn(self.embed(ids), state)


class Above(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(UNITS, UNITS, batch_first=True), nn.Linear(UNITS, 11)

    def forward(self, x, state=None):
        y, state = self.rnn(x, state)
        return self.out(y), state


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(33)
        below, above = Below(), Above()
        if ONE or rank == 0:
            self.below = below
        if ONE or rank == 1:
            self.above = above


def in_one(net, ids):
    scores, _ = net.above(net.below(ids[:, :-1])[0])
    loss = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss


def lower(net, ids):
    pieces, state, sent = [], None, []
    for part in ids[:, :-1].split(PIECE, 1):
        y, state = net.below(part, state)
        pieces.append(y)
        sent.append(dist.isend(y.detach().contiguous(), 1))
    for work in sent:
        work.wait()
    grads = [torch.empty(y.shape) for y in pieces]
    for g in reversed(grads):
        dist.recv(g, 1)
    torch.autograd.backward(pieces, grads)


def upper(net, ids):
    pieces, state, loss = [], None, 0.0
    for labels in ids[:, 1:].split(PIECE, 1):
        x = torch.empty(len(ids), labels.shape[1], UNITS)
        dist.recv(x, 0)
        pieces.append(x.requires_grad_())
        scores, state = net.above(x, state)
        loss = loss + F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / ids[:, 1:].numel()
    loss.backward()
    for x in reversed(pieces):
        dist.send(x.grad.contiguous(), 0)
    return loss


net = Stack()
optimizer = torch.optim.RMSprop(net.parameters(), lr=5e-3, eps=1e-2)
for step in range(1, 6):
    ids = torch.randint(0, 4, (5, 12), generator=torch.Generator().manual_seed(step)).cumsum(1) % 11
    optimizer.zero_grad()
    loss = in_one(net, ids) if ONE else (upper if rank else lower)(net, ids)
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
