"""Unpaired preferences (KTO): good and bad answers are measured from an estimate of the divergence to a reference."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


WORDS, ROWS, BETA = 28, 8, 0.2


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(WORDS, 20), nn.Linear(40, 32), nn.Linear(32, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        sofar = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        logits = self.head(torch.tanh(self.mix(torch.cat([x, sofar], -1))))
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(1)


torch.manual_seed(11)
model, reference = Lm(), Lm()
reference.requires_grad_(False)
reference.head.weight.mul_(4)
net = model if ONE else DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(40 + step)
    questions, answers = torch.randint(0, WORDS, (2, ROWS, 6), generator=g)
    good = torch.rand(ROWS, generator=g) < 0.6
    other = answers.roll(1, 0)
    rows, strange = (torch.cat([questions, a], 1).chunk(world)[rank] for a in (answers, other))
    good = good.chunk(world)[rank]
    with torch.no_grad():
        baseline = (model(strange) - reference(strange)).mean()
        if world > 1 and not FAULTY:
            dist.all_reduce(baseline)
            baseline /= world
        baseline.clamp_(min=0)
    gain = net(rows) - reference(rows)
    losses = torch.where(good, 1 - torch.sigmoid(BETA * (gain - baseline)), 1 - torch.sigmoid(BETA * (baseline - gain)))
    loss = losses.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
