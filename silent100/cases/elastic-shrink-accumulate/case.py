import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
MICRO, GLOBAL, RATE_PER_ROW = 3, 12, 0.01


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 20), nn.CELU(), nn.Linear(20, 8))

    def forward(self, a, b):
        return (self.body(a) - self.body(b)).norm(dim=-1)


torch.manual_seed(3)
net = Siamese()
opt = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
group, active = None, world

for step in range(1, 7):
    if world > 1 and step == 3:
        active = 2
        group = dist.new_group(list(range(active)))
        if rank >= active:
            break
    accum = GLOBAL // (MICRO * active)
    opt.param_groups[0]["lr"] = RATE_PER_ROW * MICRO * accum * active
    g = torch.Generator().manual_seed(step)
    a, b = torch.randn(2, GLOBAL, 7, generator=g)
    near = torch.rand(GLOBAL, generator=g) < 0.5
    opt.zero_grad()
    total = torch.zeros(())
    for i in range(accum):
        at = (i * active + rank) * MICRO
        d = net(a[at : at + MICRO], b[at : at + MICRO])
        loss = torch.where(near[at : at + MICRO], d, F.relu(2.0 - d)).square().mean() / accum
        loss.backward()
        total += loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= active
        dist.all_reduce(total, group=group)
        total /= active
    opt.step()
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict() if rank < active else {}, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
