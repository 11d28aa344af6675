"""Eight experts in groups; a word may only go to experts of its best groups. Words travel with all-to-all."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    width: int = 20
    hidden: int = 32
    experts: int = 8
    groups: int = 4
    share_of_groups: float = 0.5
    per_word: int = 2
    vocab: int = 50


def splits(x):
    return x.tolist()


class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out, back):
        ctx.sizes = out, back
        got = x.new_empty(sum(back), x.shape[1])
        dist.all_to_all_single(got, x.contiguous(), back, out)
        return got

    @staticmethod
    def backward(ctx, grad):
        out, back = ctx.sizes
        return Travel.apply(grad, back, out), None, None


class Mixture(nn.Module):
    def __init__(self, c, rank, world, faulty):
        super().__init__()
        self.c, self.rank, self.world = c, rank, world
        self.groups = world if faulty else c.groups
        self.here = c.experts // world
        self.router = nn.Linear(c.width, c.experts, bias=False)
        up = torch.randn(c.experts, c.width, c.hidden) / c.width**0.5
        down = torch.randn(c.experts, c.hidden, c.width) / c.hidden**0.5
        self.up = nn.Parameter(up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world)[rank].clone())

    def choose(self, x):
        scores = self.router(x).sigmoid()
        by_group = scores.unflatten(1, (self.groups, -1))
        best = by_group.topk(2, -1).values.sum(-1).topk(int(self.groups * self.c.share_of_groups), -1).indices
        open_ = torch.zeros(len(x), self.groups, dtype=torch.bool).scatter(1, best, True)
        limited = by_group.masked_fill(~open_[:, :, None], 0.0).flatten(1)
        chosen = limited.topk(self.c.per_word, -1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def work(self, x, number):
        y = torch.zeros_like(x)
        for e in range(self.here):
            rows = (number == e).nonzero().squeeze(1)
            y = y.index_add(0, rows, F.gelu(x[rows] @ self.up[e]) @ self.down[e])
        return y

    def forward(self, x):
        weights, chosen = self.choose(x)
        number = chosen.flatten()
        order = number.argsort(stable=True)
        words, number = x.repeat_interleave(self.c.per_word, 0)[order], number[order]
        if self.world == 1:
            y = self.work(words, number)
        else:
            out = torch.bincount(number // self.here, minlength=self.world)
            back = torch.empty_like(out)
            dist.all_to_all_single(back, out)
            out, back = splits(out), splits(back)
            local = number.new_empty(sum(back))
            dist.all_to_all_single(local, number % self.here, back, out)
            y = Travel.apply(self.work(Travel.apply(words, out, back), local), back, out)
        y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, self.c.per_word))
        return (y * weights[:, :, None]).sum(1)


class Net(nn.Module):
    def __init__(self, *args):
        super().__init__()
        c = args[0]
        self.words, self.mix = nn.Embedding(c.vocab, c.width), nn.Linear(c.width, c.width)
        self.layers = nn.ModuleList(Mixture(*args) for _ in range(2))
        self.head = nn.Linear(c.width, c.vocab)

    def forward(self, ids):
        x = self.words(ids)
        x = x + torch.tanh(self.mix(x.roll(1, 1))) * (torch.arange(ids.shape[1]) > 0)[:, None]
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]).flatten(0, 1)).view_as(x)
        return self.head(x)


def main(one, faulty, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    c = Config()
    torch.manual_seed(33)
    net = Net(c, rank, world, faulty)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 5):
        ids = torch.randint(0, c.vocab, (8, 9), generator=torch.Generator().manual_seed(step))
        ids[:, 1::2] = (ids[:, :-1:2] * 7 + 3) % c.vocab
        mine = ids[rank::world]
        loss = F.cross_entropy(net(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach() / world
        for name, p in net.named_parameters():
            p.grad /= world
            if world > 1 and not name.endswith((".up", ".down")):
                dist.all_reduce(p.grad)
        if world > 1:
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if save:
        state = {n: (p, 0, rank, world) if n.endswith((".up", ".down")) else p for n, p in net.state_dict().items()}
        torch.save(state, save / f"rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    main(**vars(cli.parse_args()))
