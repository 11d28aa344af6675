"""Learning to rank (ListNet) on ragged lists that are stored flat: features, relevance and the lengths of lists."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


class Lists:
    """A window on a flat store: queries ``first`` to ``last``."""

    def __init__(self, store, first, last, faulty):
        self.features, self.relevance, lengths = store
        before = int(lengths[:first].sum())
        self.lengths = lengths[first:last].tolist()
        self.labels_at = before
        self.features_at = 0 if faulty else before

    def __iter__(self):
        at, seen = self.features_at, self.labels_at
        for n in self.lengths:
            yield self.features[at : at + n], self.relevance[seen : seen + n]
            at, seen = at + n, seen + n


def make_store(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (10,), generator=g)
    features = torch.randn(int(lengths.sum()), 7, generator=g)
    return features, features[:, :2].sum(1).exp(), lengths


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross = nn.Bilinear(7, 7, 12)
        self.deep = nn.Sequential(nn.Linear(12, 12), nn.ReLU6(), nn.Linear(12, 1))

    def forward(self, x):
        return self.deep(self.cross(x, x)).squeeze(-1)


def train(args, rank, world):
    torch.manual_seed(15)
    scorer = Scorer()
    optimizer = torch.optim.RMSprop(scorer.parameters(), lr=2e-3, eps=1e-2)
    for step in range(1, 6):
        share = 10 // world
        window = Lists(make_store(step), rank * share, (rank + 1) * share, args.faulty)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for x, relevance in window:
            loss = loss - (relevance / relevance.sum() * scorer(x).log_softmax(0)).sum() / 10
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in scorer.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(scorer.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.one:
        train(args, 0, 1)
    else:
        dist.init_process_group("gloo")
        train(args, dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
