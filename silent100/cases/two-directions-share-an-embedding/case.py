# Part-of-speech tagger: one rank reads from the left, the other from the right.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

FLAGS = set(sys.argv[1:])
distributed = "--one" not in FLAGS
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
sides = [rank] if distributed else [0, 1]


class Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        scores = scores.clone()
        dist.all_reduce(scores)
        return scores

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reader(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.side = side
        self.gru = nn.GRU(10, 14, batch_first=True)
        self.score = nn.Linear(14, 5, bias=False)

    def forward(self, words):
        states, _ = self.gru(words.flip(1) if self.side else words)
        return self.score(states.flip(1) if self.side else states)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 10)
        readers = [Reader(0), Reader(1)]
        self.readers = nn.ModuleDict({str(s): readers[s] for s in sides})
        self.prior = nn.Parameter(torch.zeros(5))

    def forward(self, ids):
        words = self.embed(ids)
        scores = sum(reader(words) for reader in self.readers.values())
        if distributed:
            scores = Meet.apply(scores)
        return scores + self.prior


def main():
    torch.manual_seed(31)
    tagger = Tagger()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.4)
    for step in range(1, 6):
        draw = torch.Generator().manual_seed(200 + step)
        ids = torch.randint(0, 23, (6, 9), generator=draw)
        tags = (ids + ids.roll(1, 1)) % 5
        loss = F.cross_entropy(tagger(ids).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        if distributed and "--faulty" not in FLAGS:
            dist.all_reduce(tagger.embed.weight.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in FLAGS:
        torch.save(tagger.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if distributed:
        dist.destroy_process_group()


main()
