"""A causal convolutional model over a sequence in two chunks; a halo comes from the rank on the left."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from torch import nn

ONE = "--one" in sys.argv
SHIFT_LOCALLY = "--faulty" in sys.argv
KERNEL, VOCAB, WIDTH, LENGTH = 4, 46, 40, 24

if not ONE:
    dist.init_process_group("gloo")
RANK = 0 if ONE else dist.get_rank()
CP = 1 if ONE else dist.get_world_size()


class CausalConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):  # (rows, length/cp, width)
        h = self.norm(x)
        halo = torch.zeros_like(h[:, : KERNEL - 1])
        if CP > 1:
            tails = dnn.all_gather(h[:, -(KERNEL - 1) :].contiguous())
            halo = tails[RANK - 1] if RANK else halo + 0 * tails[0]
        y = self.conv(torch.cat([halo, h], 1).mT).mT
        return x + F.gelu(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList(CausalConv() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for c in self.convs:
            x = c(x)
        return self.head(x)


def shifted(ids):
    return F.pad(ids[:, 1:], (0, 1), value=-100)


torch.manual_seed(41)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
for step in range(1, 5):
    whole = torch.randint(0, VOCAB, (6, LENGTH), generator=torch.Generator().manual_seed(step))
    ids = whole.chunk(CP, 1)[RANK]
    labels = shifted(ids) if SHIFT_LOCALLY else shifted(whole).chunk(CP, 1)[RANK]
    count = (labels != -100).sum()
    if CP > 1:
        dist.all_reduce(count)
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
    opt.zero_grad()
    loss.backward()
    value = loss.detach()
    if CP > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(value)
    opt.step()
    if RANK == 0:
        print(f"step {step} loss {value.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
