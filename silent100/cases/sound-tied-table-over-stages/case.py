# Embedding and head share a table; each stage has a copy and the copies' gradients are added.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
stage = None if one else dist.get_rank()
torch.manual_seed(12)
table = nn.Parameter(torch.randn(44, 30) * 0.3)
cells = [nn.GRU(30, 30, batch_first=True) for _ in range(4)]
own = cells if one else cells[2 * stage : 2 * stage + 2]
modules = nn.ModuleDict({f"cell{cells.index(c)}": c for c in own})
modules.register_parameter("table", table)
optimizer = torch.optim.SGD(modules.parameters(), lr=0.3)


def through(x):
    for cell in modules.values():
        x = x + cell(x)[0]
    return x


for step in range(1, 5):
    rows = torch.randint(0, 44, (6, 12), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    if stage == 0:
        h = through(F.embedding(rows[:, :-1], table))
        dist.send(h.detach().contiguous(), 1)
        back = torch.empty_like(h)
        dist.recv(back, 1)
        h.backward(back)
    else:
        x = F.embedding(rows[:, :-1], table) if one else torch.empty(6, 11, 30)
        if stage == 1:
            dist.recv(x, 0)
            x.requires_grad_()
        loss = F.cross_entropy((through(x) @ table.T).transpose(1, 2), rows[:, 1:])
        loss.backward()
        if stage == 1:
            dist.send(x.grad.contiguous(), 0)
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if not one:
        dist.all_reduce(table.grad)
    optimizer.step()
if "--save" in sys.argv:
    torch.save(modules.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{stage or 0}.pt"))
if not one:
    dist.destroy_process_group()
