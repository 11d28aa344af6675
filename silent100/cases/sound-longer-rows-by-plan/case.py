"""A plan of row lengths; the number of words in an update stays about the same."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE = "--one" in sys.argv
PLAN = [(16, 4), (11, 6), (8, 8), (6, 11), (4, 16), (3, 21)]


class Causal(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.words, self.places = nn.Embedding(32, d), nn.Embedding(32, d)
        self.layer = nn.TransformerEncoderLayer(d, 3, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, 32)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        return self.out(self.layer(x, src_mask=mask, is_causal=True))


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = Causal()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (rows, length) in enumerate(PLAN, 1):
        ids = torch.randint(0, 32, (rows, length + 1), generator=torch.Generator().manual_seed(step))
        ids[:, 1:] = (ids[:, :1] + 3 * torch.arange(1, length + 1)) % 32
        mine = ids[rank::world]
        logits = net(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum") / (rows * length)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for t in [p.grad for p in net.parameters()] + [loss]:
                dist.all_reduce(t)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
