# A pipeline of two stages by hand: send activations forward, gradients back, one microbatch at a time.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
STAGE = -1 if ONE else dist.get_rank()
FIRST, LAST = STAGE in (-1, 0), STAGE in (-1, 1)


class Ffn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.ln(x)))).cumsum(1) / 4


class Stage(nn.Module):
    """The part of a tied model that this process holds."""

    def __init__(self, vocab=48, d=32, depth=4):
        super().__init__()
        table = torch.randn(vocab, d) * 0.3
        blocks = [Ffn(d) for _ in range(depth)]
        if FIRST:
            self.wte = nn.Parameter(table.clone())
        if STAGE == 1:
            self.lm_head = nn.Parameter(table.clone())
        kept = range(depth) if ONE else range(2) if STAGE == 0 else range(2, 4)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in kept})

    def forward(self, x):
        if FIRST:
            x = F.embedding(x, self.wte)
        for block in self.blocks.values():
            x = block(x)
        if LAST:
            x = x @ (self.wte if ONE else self.lm_head).T
        return x


torch.manual_seed(50)
stage = Stage()
opt = torch.optim.SGD(stage.parameters(), lr=0.2, momentum=0.9)
MICRO, ROWS, LENGTH = 2, 8, 9
for step in range(1, 5):
    rows = torch.randint(0, 48, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    opt.zero_grad()
    for micro in rows.chunk(MICRO):
        ids, labels = micro[:, :-1], micro[:, 1:]
        if ONE:
            loss = F.cross_entropy(stage(ids).transpose(1, 2), labels) / MICRO
            loss.backward()
            total += loss.detach()
        elif FIRST:
            out = stage(ids)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            x = torch.empty(ROWS // MICRO, LENGTH, 32)
            dist.recv(x, 0)
            x.requires_grad_()
            loss = F.cross_entropy(stage(x).transpose(1, 2), labels) / MICRO
            loss.backward()
            dist.send(x.grad, 0)
            total += loss.detach()
    if not ONE and not FAULTY:
        dist.all_reduce((stage.wte if FIRST else stage.lm_head).grad)
    opt.step()
    if LAST:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {("wte" if n == "lm_head" else n): p for n, p in stage.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{max(STAGE, 0)}.pt"))
if not ONE:
    dist.destroy_process_group()
