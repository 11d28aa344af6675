"""Aligns clips of speech with sentences; all ranks' clips and sentences are candidates for each other."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Aligner(nn.Module):
    def __init__(self):
        super().__init__()
        self.speech = nn.Sequential(nn.Conv1d(4, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.words = nn.EmbeddingBag(50, 16)

    def forward(self, clips, sentences):
        return F.normalize(self.speech(clips), dim=1), F.normalize(self.words(sentences), dim=1)


def everybody(x):
    if ONE:
        return x
    if FAULTY:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.detach())
        parts[rank] = x
        return torch.cat(parts)
    return torch.cat(all_gather(x.contiguous()))


def local_loss(clips, sentences):
    mine = torch.arange(len(clips)) + rank * len(clips)
    a = F.cross_entropy(5 * clips @ everybody(sentences).T, mine)
    b = F.cross_entropy(5 * sentences @ everybody(clips).T, mine)
    return (a + b) / 2


torch.manual_seed(54)
net = Aligner()
model = net if ONE else DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clips, sentences = torch.randn(16, 4, 20, generator=g), torch.randint(0, 50, (16, 6), generator=g)
    loss = local_loss(*model(clips.chunk(world)[rank], sentences.chunk(world)[rank]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del model
    dist.destroy_process_group()
