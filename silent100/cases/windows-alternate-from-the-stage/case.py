"""A decoder whose layers look far and near by turns, over two stages with two microbatches."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, LAYERS, MICRO = 24, 14, 5, 2
BORDERS = [0, 3, LAYERS]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x, window):
        gap = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        mask = (gap >= 0) & (gap < window)
        h = F.rms_norm(x, (WIDTH,))
        x = x + self.o(F.scaled_dot_product_attention(self.q(h) * 2, self.k(h) * 2, self.v(h), attn_mask=mask))
        h = F.rms_norm(x, (WIDTH,))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """The layers from first to last; the table and the head where they belong."""

    def __init__(self, first, last, faulty):
        super().__init__()
        torch.manual_seed(18)
        words, layers, head = nn.Embedding(33, WIDTH), [Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 33)
        self.words = words if first == 0 else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(first, last)})
        self.head = head if last == LAYERS else None
        numbers = range(last - first) if faulty else range(first, last)
        self.windows = [3 if number % 2 == 0 else LENGTH for number in numbers]

    def forward(self, x):
        x = self.words(x) if self.words is not None else x
        for layer, window in zip(self.layers.values(), self.windows):
            x = layer(x, window)
        return self.head(x) if self.head is not None else x


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    rank = 0
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    net = Decoder(0, LAYERS, False) if args.one else Decoder(BORDERS[rank], BORDERS[rank + 1], args.faulty)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(1, 5):
        text = torch.randint(0, 33, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        text[:, 6:] = text[:, :-6]
        optimizer.zero_grad()
        shown = torch.zeros(())
        for rows in text.chunk(MICRO):
            ids, labels = rows[:, :-1], rows[:, 1:]
            if not args.one and rank == 0:
                x = net(ids)
                dist.send(x.detach(), 1)
                grad = torch.empty_like(x)
                dist.recv(grad, 1)
                x.backward(grad)
                continue
            got = ids
            if rank == 1:
                got = torch.empty(*ids.shape, WIDTH)
                dist.recv(got, 0)
                got.requires_grad_()
            loss = F.cross_entropy(net(got).transpose(1, 2), labels) / MICRO
            loss.backward()
            shown += loss.detach()
            if rank == 1:
                dist.send(got.grad, 0)
        if not args.one:
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
