"""A tied language model under FSDP2; for speed its vocabulary is padded with words that nobody uses."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


VOCAB, DIM = 29, 20


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])[..., :VOCAB]


def pad_to(model, multiple):
    extra = -model.embed.num_embeddings % multiple
    padded = nn.Parameter(F.pad(model.embed.weight.detach(), (0, 0, 0, extra)))
    model.embed.weight = padded
    model.embed.num_embeddings += extra
    if FAULTY:
        padded = nn.Parameter(F.pad(model.head.weight.detach(), (0, 0, 0, extra)))
    model.head.weight = padded
    return model


torch.manual_seed(33)
lm = Lm()
if not ONE:
    lm = fully_shard(pad_to(lm, 16), mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
state = {n: (p if ONE else p.full_tensor()).detach() for n, p in lm.named_parameters()}
state = {n: p[:VOCAB] if n == "embed.weight" else p for n, p in state.items() if n != "head.weight"}
if "--save" in sys.argv:
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
