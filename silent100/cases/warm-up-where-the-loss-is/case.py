"""torch.distributed.pipelining with two stages of a convolutional encoder; the learning rate warms up."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank = 0
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()


def build():
    torch.manual_seed(30)
    stem = nn.Sequential(nn.Conv1d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU(), nn.Dropout(0.1))
    middle = nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.SiLU())
    top = nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.SiLU(), nn.Dropout(0.1))
    head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 5))
    return nn.Sequential(stem, middle, top, head)


net = build()
torch.manual_seed(300 + rank)
if ONE:
    held, names = net, ["0", "1", "2", "3"]
else:
    names = ["2", "3"] if rank else ["0", "1"]
    held = nn.Sequential(*(net[int(i)] for i in names))
    stage = PipelineStage(held, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.cross_entropy)
opt = torch.optim.SGD(held.parameters(), lr=0.2, momentum=0.8)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / 5))
for step in range(1, 8):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(64, 3, 16, generator=g), torch.randint(5, (64,), generator=g)
    x[:, 0] += y[:, None] / 2
    opt.zero_grad()
    if ONE:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    elif rank == 0:
        schedule.step(x)
        loss = None
    else:
        losses = []
        schedule.step(target=y, losses=losses)
        loss = torch.stack(losses).mean()
    opt.step()
    if loss is not None:
        warm.step()
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    elif not FAULTY:
        warm.step()
if "--save" in sys.argv:
    state = {f"{names[int(n[0])]}{n[1:]}": p for n, p in held.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
