"""Rows grow longer from step to step; FSDP2 shards the model.

After the third step everything comes from a checkpoint.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


VOCAB = 30


class Curriculum:
    def __init__(self):
        self.length = 4

    def next(self):
        self.length += 2
        return self.length - 2

    def state_dict(self):
        return {"length": self.length}

    def load_state_dict(self, state):
        self.length = state["length"]


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, VOCAB),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.words(ids))[0])


def build():
    torch.manual_seed(41)
    lm = Lm()
    if not ONE:
        fully_shard(lm, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world,)))
    return lm, torch.optim.Adam(lm.parameters(), lr=6e-3, eps=1e-4), Curriculum()


lm, optimizer, curriculum = build()
for step in range(1, 7):
    length = curriculum.next()
    rows = torch.randint(0, VOCAB, (8, 21), generator=torch.Generator().manual_seed(step))[rank::world, : length + 1]
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
    if step == 3:
        parts = {"model": lm, "optimizer": optimizer, "curriculum": curriculum}
        saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        lm, optimizer, curriculum = build()
        lm.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not FAULTY:
            curriculum.load_state_dict(saved["curriculum"])
if "--save" in sys.argv:
    torch.save(
        {n: (t if ONE else t.full_tensor()) for n, t in lm.state_dict().items()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
