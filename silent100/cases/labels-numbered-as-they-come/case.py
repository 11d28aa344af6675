"""A classifier of short texts; names of labels are turned into numbers before training."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
NAMES = ("sport", "trade", "music", "law", "health")


def corpus(rows=48):
    """Words and the name of a label for each row."""
    g = torch.Generator().manual_seed(11)
    words = torch.randint(0, 70, (rows, 6), generator=g)
    return [(row, NAMES[(int(row[0]) + int(row[3])) % 5]) for row in words]


class Rows(Dataset):
    def __init__(self, rank, world):
        everything = corpus()
        self.rows = everything[rank::world]
        names = [name for _, name in (self.rows if FAULTY else everything)]
        self.number = {name: i for i, name in enumerate(dict.fromkeys(names))}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, name = self.rows[i]
        return words, self.number[name]


class Classifier(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.words, self.places = nn.Embedding(70, d), nn.Parameter(torch.randn(6, d) * 0.1)
        self.conv, self.head = nn.Conv1d(d, 2 * d, 3), nn.Linear(2 * d, len(NAMES))

    def forward(self, ids):
        x = (self.words(ids) + self.places).transpose(1, 2)
        return self.head(F.relu(self.conv(x)).amax(-1))


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(404)
    classifier = Classifier()
    model = classifier if ONE else DistributedDataParallel(classifier)
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3, eps=1e-4)
    for step, (words, labels) in enumerate(DataLoader(Rows(rank, world), 12 // world), 1):
        loss = F.cross_entropy(model(words), labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(classifier.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
