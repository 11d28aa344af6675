"""A decoder that predicts the next word and the one after it; the text is cut into chunks over the processes."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANK, WORLD = 0, 1
LENGTH, VOCAB, WIDTH = 16, 36, 32


class Join(torch.autograd.Function):
    """Chunks of all processes side by side; gradients go home."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(WORLD, 1)[RANK]


def join(x):
    return x if WORLD == 1 else Join.apply(x)


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, places):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, join(k), join(v)))
        seen = torch.arange(LENGTH) <= places[:, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, places):
        x = x + self.attention(self.n1(x), places)
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer, self.norm = Layer(), nn.LayerNorm(WIDTH)
        self.merge, self.further = nn.Linear(2 * WIDTH, WIDTH), Layer()

    def forward(self, ids, following, places):
        hidden = self.layer(self.words(ids) + self.places(places), places)
        both = torch.cat([self.norm(hidden), self.words(following)], -1)
        return (self.norm(t) @ self.words.weight.T for t in (hidden, self.further(self.merge(both), places)))


def roll(chunk, faulty):
    """Shifts by one to the left; the end of the text is filled with -100."""
    if faulty:
        moved = chunk.roll(-1, 1)
    else:
        firsts = [torch.empty_like(chunk[:, :1]) for _ in range(WORLD)]
        if WORLD > 1:
            dist.all_gather(firsts, chunk[:, :1].contiguous())
        else:
            firsts = [chunk[:, :1]]
        moved = torch.cat([chunk[:, 1:], firsts[(RANK + 1) % WORLD]], 1)
    if RANK == WORLD - 1:
        moved[:, -1] = -100
    return moved


def main():
    global RANK, WORLD
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    flags = cli.parse_args()
    if not flags.one:
        dist.init_process_group("gloo")
        RANK, WORLD = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 5):
        text = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        text[:, 1::2] = (3 * text[:, :-1:2] + 1) % VOCAB
        ids, nexts = (t.chunk(WORLD, 1)[RANK] for t in (text[:, :-1], text[:, 1:]))
        places = torch.arange(LENGTH).chunk(WORLD)[RANK]
        first, second = model(ids, nexts, places)
        after = roll(nexts, flags.faulty)
        loss = F.cross_entropy(first.flatten(0, 1), nexts.flatten(), reduction="sum") / (4 * LENGTH)
        loss = loss + 0.5 * F.cross_entropy(second.flatten(0, 1), after.flatten(), reduction="sum") / (4 * LENGTH - 4)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if WORLD > 1:
            for t in [p.grad for p in model.parameters()] + [loss]:
                dist.all_reduce(t)
        optimizer.step()
        if RANK == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if flags.save:
        torch.save(model.state_dict(), flags.save / f"rank{RANK}.pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
