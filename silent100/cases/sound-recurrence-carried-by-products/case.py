"""A gated linear recurrence over a text in pieces; states at the borders are handed over after the fact."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

RANK, WORLD = 0, 1


class Borders(torch.autograd.Function):
    """What all ranks have at their ends."""

    @staticmethod
    def forward(ctx, t):
        parts = [torch.empty_like(t) for _ in range(WORLD)]
        dist.all_gather(parts, t.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[RANK]


class Recurrence(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        keep = torch.sigmoid(self.gate(x) + 1)
        new = (1 - keep) * self.value(x)
        state, product = torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
        states, products = [], []
        for t in range(x.shape[1]):
            state, product = keep[:, t] * state + new[:, t], keep[:, t] * product
            states.append(state)
            products.append(product)
        states, products = torch.stack(states, 1), torch.stack(products, 1)
        if WORLD > 1:
            borders = Borders.apply(torch.stack([state, product]))
            ends, wholes = borders.unbind(1)
            before = 0 * borders.sum() + torch.zeros_like(state)  # all ranks take part in backward
            for r in range(RANK):
                before = wholes[r] * before + ends[r]
            states = states + products * before[:, None]
        return x + self.out(torch.tanh(states))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b, self.head = nn.Embedding(26, 20), Recurrence(), Recurrence(), nn.Linear(20, 26)

    def forward(self, ids):
        return self.head(self.b(self.a(self.words(ids))))


def main():
    global RANK, WORLD
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--save", type=Path)
    args = p.parse_args()
    if not args.one:
        dist.init_process_group("gloo")
        RANK, WORLD = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.8)
    for step in range(1, 6):
        text = torch.randint(0, 26, (5, 22), generator=torch.Generator().manual_seed(step))
        text[:, 7:] = text[:, :-7]
        ids, labels = (t.tensor_split(WORLD, 1)[RANK] for t in (text[:, :-1], text[:, 1:]))
        loss = F.cross_entropy(net(ids).transpose(1, 2), labels, reduction="sum") / (5 * 21)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if WORLD > 1:
            for t in [q.grad for q in net.parameters()] + [loss]:
                dist.all_reduce(t)
        optimizer.step()
        if RANK == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), args.save / f"rank{RANK}.pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
