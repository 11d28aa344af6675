"""Pipeline training with Adam-free updates and a token-sum loss."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
PAD, CHUNKS = 0, 2
tokens = {"global": 1}


def token_sum(logits, labels):
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
    return total if faulty else total / tokens["global"]


class Part(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(8)
        whole = {
            "embed": nn.Embedding(40, 36),
            "mix1": nn.LSTM(36, 36, batch_first=True),
            "mix2": nn.LSTM(36, 36, batch_first=True),
            "norm": nn.RMSNorm(36),
            "head": nn.Linear(36, 40, bias=False),
        }
        names = list(whole)
        self.layers = nn.ModuleDict({n: whole[n] for n in names[first:last]})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = x + layer(x)[0] if name.startswith("mix") else layer(x)
        return x


def batch(step):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(1, 40, (8, 13), generator=g)
    rows = rows.masked_fill(torch.arange(13) >= torch.randint(4, 14, (8, 1), generator=g), PAD)
    return rows[:, :-1], rows[:, 1:]


rank = 0
if one:
    model = Part(0, 5)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Part(0, 2) if rank == 0 else Part(2, 5)
    schedule = ScheduleGPipe(
        PipelineStage(model, rank, 2, torch.device("cpu")), CHUNKS, loss_fn=token_sum, scale_grads=False
    )
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-3)
for step in range(1, 5):
    ids, labels = batch(step)
    tokens["global"] = int((labels != PAD).sum())
    optimizer.zero_grad()
    losses = []
    if one:
        losses = [token_sum(model(ids), labels)]
        losses[0].backward()
    elif rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=labels, losses=losses)
    optimizer.step()
    if losses:
        logged = torch.stack(losses).sum() / (tokens["global"] if faulty else 1)
        print(f"step {step} loss {logged.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
