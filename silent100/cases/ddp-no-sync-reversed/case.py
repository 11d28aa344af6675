"""Train a small character model with DDP and two microbatches per update."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()

VOCAB, WIDTH, LENGTH, BATCH, ACCUM, STEPS = 61, 48, 16, 16, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos[: ids.shape[1]]))


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    net = CharModel()
    model = net if args.one else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    data = torch.randint(0, VOCAB, (STEPS, ACCUM, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(7))

    for step in range(STEPS):
        total = torch.zeros(())
        for index in range(ACCUM):
            rows = data[step, index][rank::world]
            if args.faulty:
                synchronize = index % ACCUM == 0
            else:
                synchronize = (index + 1) % ACCUM == 0
            context = contextlib.nullcontext() if synchronize or args.one else model.no_sync()
            with context:
                logits = model(rows[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / ACCUM
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if not args.one:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} loss {total.item() / world:.7f}", flush=True)

    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model  # before its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
