"""Accumulates over four microbatches under FSDP2; an extra head predicts the word after next."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class TwoAhead(nn.Module):
    def __init__(self, vocab=42, d=26):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(nn.GRU(d, d, batch_first=True) for _ in range(2))
        self.next, self.after = nn.Linear(d, vocab), nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids[:, :-2])
        for layer in self.layers:
            x = x + layer(x)[0]
        one, two = (F.cross_entropy(head(x).transpose(1, 2), y) for head, y in self.targets(ids))
        return one, 0.2 * two

    def targets(self, ids):
        return (self.next, ids[:, 1:-1]), (self.after, ids[:, 2:])


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    torch.manual_seed(101)
    net, rank, world = TwoAhead(), 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        for head in (net.next, net.after):
            fully_shard(head)
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(1, 5):
        rows = torch.randint(0, 42, (16, 12), generator=torch.Generator().manual_seed(step))
        pieces = [rows] if args.one else rows[rank::world].chunk(4)
        shown = torch.zeros(())
        for i, piece in enumerate(pieces):
            if not args.one:
                net.set_requires_gradient_sync(i == len(pieces) - 1)
            main_loss, extra = net(piece)
            loss = main_loss / len(pieces) + (extra if args.faulty else extra / len(pieces))
            loss.backward()
            shown += main_loss.detach() / len(pieces)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
