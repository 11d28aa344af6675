# One replica trains two updates, then a second one joins and receives everything.
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


class Elastic:
    def __init__(self):
        torch.manual_seed(86)
        self.net = nn.Sequential(nn.Linear(18, 54), nn.GELU(), nn.LayerNorm(54), nn.Linear(54, 18))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.size = 1

    def resize(self, size):
        """All members take over the first one's weights; the batch of an update stays what it was."""
        for p in self.net.parameters():
            dist.broadcast(p.data, src=0)
        if FAULTY:
            self.optimizer.param_groups[0]["lr"] *= size / self.size
        self.size = size

    def update(self, step):
        x = torch.randn(16, 18, generator=torch.Generator().manual_seed(step))[RANK :: self.size]
        loss = F.mse_loss(self.net(x), x.roll(4, 1)) / self.size
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if self.size > 1:
            for p in self.net.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        self.optimizer.step()
        return loss.item()


job = Elastic()
for step in range(1, 6):
    if step == 3 and not ONE:
        job.resize(2)
    if RANK >= job.size:
        continue
    loss = job.update(step)
    if RANK == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(job.net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
