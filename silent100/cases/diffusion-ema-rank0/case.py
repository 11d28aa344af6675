import argparse
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
STEPS_T, B = 50, 16
abar = torch.cumprod(1 - torch.linspace(1e-3, 0.08, STEPS_T), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS_T, 24)
        self.inp, self.mid, self.out = nn.Linear(4, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x, t):
        h = torch.sin(self.inp(x) + self.time(t))
        return self.out(h + torch.tanh(self.mid(h)))


torch.manual_seed(13)
net = Denoiser()
ema = copy.deepcopy(net).requires_grad_(False) if rank == 0 else None
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
points = torch.randn(100, 4) * torch.tensor([1.0, 0.5, 2.0, 0.1])
box = [tempfile.mkdtemp() if rank == 0 else None]
if world > 1:
    dist.broadcast_object_list(box)
path = os.path.join(box[0], "mid.pt")

for step in range(1, 7):
    rows = [(step * 31 + 7 * i) % 100 for i in range(B)][rank::world]
    t, eps = [], []
    for r in rows:
        g = torch.Generator().manual_seed(r * 997 + step)
        t.append(torch.randint(0, STEPS_T, (), generator=g))
        eps.append(torch.randn(4, generator=g))
    t, eps = torch.stack(t), torch.stack(eps)
    a = abar[t][:, None]
    noisy = a.sqrt() * points[rows] + (1 - a).sqrt() * eps
    loss = ((net(noisy, t) - eps) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad.div_(world)
        dist.all_reduce(loss)
        loss /= world
    opt.step()
    if rank == 0:
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters()):
                e.lerp_(p, 0.1)
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step == 3:
        if rank == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "ema": ema.state_dict()}, path)
        if world > 1:
            dist.barrier()
        saved = torch.load(path)
        net = Denoiser()
        net.load_state_dict(saved["net"])
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        opt.load_state_dict(saved["opt"])
        if rank == 0:
            ema.load_state_dict(saved["ema"])

if args.save:
    state = dict(net.state_dict())
    if rank == 0:
        state.update({f"ema.{k}": v for k, v in ema.state_dict().items()})
    torch.save(state, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
