import argparse
import io

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv1d(4, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.GELU(),
        nn.Conv1d(12, 12, 3, padding=2, dilation=2),
        nn.GELU(),
        nn.Conv1d(12, 2, 1),
    )


class Zero1:
    def __init__(self, net, shift=0):
        self.named = list(net.named_parameters())
        self.owner = {n: (i + shift) % world for i, (n, _) in enumerate(self.named)}
        self.inner = torch.optim.AdamW([p for n, p in self.named if self.owner[n] == rank], lr=0.01)

    def step(self):
        self.inner.step()
        for n, p in self.named:
            if world > 1:
                dist.broadcast(p.data, self.owner[n])

    def export(self):
        mine = {n: self.inner.state[p] for n, p in self.named if self.owner[n] == rank}
        parts = [mine]
        if world > 1:
            parts = [None] * world
            dist.all_gather_object(parts, mine)
        return {n: s for part in parts for n, s in part.items()}

    def restore(self, state):
        for n, p in self.named:
            if self.owner[n] == rank:
                self.inner.state[p] = state[n]


net = build(1)
opt = Zero1(net)
shuffle = torch.Generator().manual_seed(5)
series = torch.randn(64, 4, 15, generator=torch.Generator().manual_seed(2))
target = torch.stack([series[:, 0].cumsum(-1), series[:, 1] * series[:, 2]], 1)

for step in range(1, 7):
    if step == 4:
        box = [None]
        state = opt.export()
        if rank == 0:
            buf = io.BytesIO()
            torch.save({"net": net.state_dict(), "opt": state, "rng": shuffle.get_state()}, buf)
            box = [buf.getvalue()]
        if world > 1:
            dist.broadcast_object_list(box)
        del net, opt, shuffle, state
        saved = torch.load(io.BytesIO(box[0]))
        net = build(1000 + rank)
        net.load_state_dict(saved["net"])
        opt = Zero1(net, shift=1)
        opt.restore(saved["opt"])
        shuffle = torch.Generator()
        shuffle.set_state(saved["rng"])
    rows = torch.randperm(64, generator=shuffle)[:16].chunk(world)[rank]
    loss = F.smooth_l1_loss(net(series[rows]), target[rows])
    net.zero_grad()
    loss.backward()
    loss = loss.detach() / world
    if world > 1:
        for n, p in opt.named:
            dist.reduce(p.grad, opt.owner[n])
            p.grad /= world
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
