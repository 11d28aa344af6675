"""A pipeline of two stages under autocast; gradients between stages travel in bfloat16, as in one process."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ALONE = "--one" in sys.argv
SIZES = [5, 3, 4]


class Mixer(nn.Module):
    def __init__(self, d=28, length=9):
        super().__init__()
        self.norm, self.over, self.up, self.down = (
            nn.LayerNorm(d),
            nn.Linear(length, length),
            nn.Linear(d, 56),
            nn.Linear(56, d),
        )

    def forward(self, x):
        past = self.over.weight.tril()
        x = x + F.linear(self.norm(x.float()).transpose(1, 2), past, self.over.bias).transpose(1, 2)
        return x + self.down(F.silu(self.up(x)))


class Stage(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).bfloat16()


def parts(step):
    text = torch.randint(0, 35, (sum(SIZES), 10), generator=torch.Generator().manual_seed(step))
    return [(t[:, :-1], t[:, 1:]) for t in text.sort(1).values.split(SIZES)]


def share(logits, labels):
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (sum(SIZES) * labels.shape[1])


torch.manual_seed(70)
stages = [Stage(nn.Embedding(35, 28), Mixer(), Mixer()), Stage(Mixer(), nn.Linear(28, 35))]
rank = 0
if not ALONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stages = {rank: stages[rank]}
else:
    stages = dict(enumerate(stages))
optimizer = torch.optim.AdamW([p for s in stages.values() for p in s.parameters()], lr=0.01, eps=1e-4)
for step in range(1, 6):
    optimizer.zero_grad()
    shown = torch.zeros(())
    for ids, labels in parts(step):
        if ALONE:
            loss = share(stages[1](stages[0](ids)), labels)
            loss.backward()
            shown += loss.detach()
        elif rank == 0:
            x = stages[0](ids)
            dist.send(x.detach().contiguous(), 1)
            grad = torch.empty_like(x)
            dist.recv(grad, 1)
            x.backward(grad)
        else:
            x = torch.empty(*ids.shape, 28, dtype=torch.bfloat16)
            dist.recv(x, 0)
            loss = share(stages[1](x.requires_grad_()), labels)
            loss.backward()
            dist.send(x.grad.contiguous(), 0)
            shown += loss.detach()
    if not ALONE:
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.6f}", flush=True)
if "--save" in sys.argv:
    state = {f"stages.{n}.{k}": v for n, s in stages.items() for k, v in s.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ALONE:
    dist.destroy_process_group()
