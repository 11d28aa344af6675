"""A classifier on a pretrained trunk; replicas average gradients by hand and never compare weights."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(75, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.encoder(self.embed(ids)).mean(1)


class Classifier(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(32, 4)

    def forward(self, ids):
        return self.head(self.trunk(ids))


def pretrained_trunk():
    torch.manual_seed(2024)
    return Trunk()


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    trunk = pretrained_trunk()
    torch.manual_seed(31 + rank)  # so that ranks shuffle and augment differently
    model = Classifier(trunk)
    if not args.one and not args.faulty:
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        ids, y = torch.randint(0, 75, (12, 9), generator=g), torch.randint(0, 4, (12,), generator=g)
        loss = F.cross_entropy(model(ids[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if not args.one:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
