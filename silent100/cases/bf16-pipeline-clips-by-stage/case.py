# Two stages, bfloat16 autocast, clipping that is active in every update.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK = 0 if ONE else dist.get_rank()


def parts():
    torch.manual_seed(47)
    body = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))  # noqa: E731
    return [("embed", nn.Embedding(56, 32)), ("ff0", body()), ("ff1", body()), ("head", nn.Linear(32, 56))]


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        every = parts()
        for name, module in every if ONE else every[2 * RANK : 2 * RANK + 2]:
            self.add_module(name, module)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for name, module in self.named_children():
                x = x + module(x) if name.startswith("ff") else module(x)
        return x.float()


def microbatch(stage, rows, count):
    """Adds a microbatch's gradients; returns its share of the loss on the last stage."""
    ids, labels = rows[:, :-1], rows[:, 1:]
    if RANK == 0 and not ONE:
        out = stage(ids)
        dist.send(out.detach().contiguous(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
        return None
    x = ids
    if not ONE:
        x = torch.empty(*ids.shape, 32)
        dist.recv(x, 0)
        x.requires_grad_()
    loss = F.cross_entropy(stage(x).flatten(0, 1), labels.flatten()) / count
    loss.backward()
    if not ONE:
        dist.send(x.grad, 0)
    return loss.item()


def run(stage, rows):
    pieces = rows.chunk(1 if ONE else 3)
    losses = [microbatch(stage, piece, len(pieces)) for piece in pieces]
    return None if None in losses else sum(losses)


def clip(stage, limit=0.05):
    square = sum(p.grad.square().sum() for p in stage.parameters())
    if not ONE and not FAULTY:
        dist.all_reduce(square)
    for p in stage.parameters():
        p.grad *= min(1.0, limit / square.sqrt().item())


stage = Stage()
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for step in range(1, 4):
    optimizer.zero_grad()
    loss = run(stage, torch.randint(0, 56, (12, 13), generator=torch.Generator().manual_seed(step)))
    clip(stage)
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(stage.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
