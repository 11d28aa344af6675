"""Cross entropy in chunks.

Ranks never hold all logits and have their gradient before backward begins; FSDP shards the rest.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


VOCAB, DIM = 34, 20


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels):
        to_x, to_w, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        for begin in range(0, len(x), 7):
            some = slice(begin, begin + 7)
            logits = x[some] @ weight.T
            loss += F.cross_entropy(logits, labels[some], reduction="sum") / len(x)
            slope = logits.softmax(-1)
            slope[torch.arange(len(slope)), labels[some]] -= 1
            slope /= len(x)
            to_x[some] = slope @ weight
            to_w += slope.T @ x[some]
        ctx.save_for_backward(to_x, to_w)
        return loss

    @staticmethod
    def backward(ctx, g):
        to_x, to_w = ctx.saved_tensors
        return g * to_x, g * to_w, None


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Parameter(torch.randn(VOCAB, DIM) / DIM**0.5)

    def forward(self, ids, labels):
        x = self.rnn(self.words(ids))[0].flatten(0, 1)
        if ONE:
            return F.cross_entropy(x @ self.head.T, labels.flatten())
        return Chunked.apply(x, self.head, labels.flatten())


torch.manual_seed(93)
lm = Lm()
if not ONE:
    fully_shard(lm, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = lm(rows[:, :-1], rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {n: (p if ONE else p.full_tensor()).detach() for n, p in lm.named_parameters()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
