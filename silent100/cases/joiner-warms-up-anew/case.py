"""Two replicas train and a third joins before the fifth update; rows are shared out anew."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
JOIN, ROWS = 5, 12


class Mixer(nn.Module):
    """Mixes places, then channels."""

    def __init__(self, places=6, channels=8):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.places = nn.Sequential(nn.Linear(places, 12), nn.GELU(), nn.Linear(12, places))
        self.channels = nn.Sequential(nn.Linear(channels, 16), nn.GELU(), nn.Linear(16, channels))

    def forward(self, x):
        x = x + self.places(self.n1(x).mT).mT
        return x + self.channels(self.n2(x))


def fresh(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), Mixer(), Mixer(), nn.Linear(8, 1))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=8)
    return net, opt, warm


def welcome(net, opt, warm):
    """Rank 0 tells the joiner all it needs."""
    parts = [net.state_dict(), opt.state_dict()["state"]]
    if "--faulty" not in sys.argv:
        parts += [warm.state_dict(), opt.state_dict()["param_groups"]]
    box = [parts]
    dist.broadcast_object_list(box, 0)
    if rank < 2:
        return
    net.load_state_dict(box[0][0])
    opt.load_state_dict({"state": box[0][1], "param_groups": (box[0][3:] or [opt.state_dict()["param_groups"]])[0]})
    if len(box[0]) > 2:
        warm.load_state_dict(box[0][2])


net, opt, warm = fresh(10 if rank < 2 else 99)
pair = None if ONE else dist.new_group([0, 1])
for step in range(1, 10):
    members, group = (1, None) if ONE else (2, pair) if step < JOIN else (3, None)
    if step == JOIN and not ONE:
        welcome(net, opt, warm)
    if rank >= members:
        continue
    x = torch.randn(ROWS, 6, 4, generator=torch.Generator().manual_seed(step))
    y = x.cumsum(1)[..., :1] / 2
    part = slice(rank * ROWS // members, (rank + 1) * ROWS // members)
    loss = F.mse_loss(net(x[part]), y[part])
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for t in [loss, *(p.grad for p in net.parameters())]:
            dist.all_reduce(t, group=group)
            t /= members
    opt.step()
    warm.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
