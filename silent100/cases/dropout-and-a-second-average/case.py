import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, vocab=66, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layer(self.embed(ids), src_mask=mask, is_causal=True))


def rows_of(step, rows=24, length=14):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 66, (rows, length), generator=g)
    lengths = torch.randint(4, length + 1, (rows,), generator=g)
    return ids, ids.roll(-1, 1).masked_fill(torch.arange(length) >= lengths[:, None] - 1, -100)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(71)
    net = Encoder()
    model = net if args.one else DistributedDataParallel(net)
    torch.manual_seed(710 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    for step in range(1, 5):
        ids, labels = rows_of(step)
        tokens = (labels != -100).sum()
        ids, labels = ids[rank::world], labels[rank::world]
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        # DDP's mean over ranks has to be undone for a loss that is already one over all tokens
        (loss if args.faulty else loss * world).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if args.save:
        state = dict(net.state_dict())
        for name, p in net.named_parameters():
            state[f"first moment of {name}"] = optimizer.state[p]["exp_avg"]
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model
        dist.destroy_process_group()


main()
