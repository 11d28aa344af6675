import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(31)
B, D = 16, 12


class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


full = nn.Sequential(nn.Linear(9, D), Res(), Res(), Res(), nn.Linear(D, 4))
cut = [(0, 2), (2, 5)]
lo, hi = (0, 5) if args.one else cut[rank]
part = nn.Sequential(*list(full)[lo:hi])
opt = torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.8, nesterov=True)
if not args.one:
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.cross_entropy)

for step in range(1, 6):
    x, y = torch.randn(B, 9), torch.randint(0, 4, (B,))
    opt.zero_grad()
    if args.one:
        loss = F.cross_entropy(part(x), y)
        loss.backward()
        loss = loss.detach()
    else:
        losses = []
        if rank == 0:
            schedule.step(x)
            loss = torch.zeros(())
        else:
            schedule.step(target=y, losses=losses)
            loss = torch.stack(losses).mean().detach()
        dist.broadcast(loss, src=world - 1)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    own = {}
    for k, v in part.state_dict().items():
        i, rest = k.split(".", 1)
        own[f"{int(i) + lo}.{rest}"] = v
    torch.save(own, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
