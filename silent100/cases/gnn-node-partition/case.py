import argparse

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

N, FEAT, HID, CLS = 45, 6, 16, 4
g = torch.Generator().manual_seed(0)
src, dst = torch.randint(0, N, (2, 160), generator=g)
src, dst = torch.cat([src, dst, torch.arange(N)]), torch.cat([dst, src, torch.arange(N)])
deg = torch.bincount(dst, minlength=N).double()
feats, labels = torch.randn(N, FEAT, generator=g), torch.randint(0, CLS, (N,), generator=g)
train = torch.zeros(N, dtype=torch.bool)
train[:22] = torch.rand(22, generator=g) < 0.8
sizes = [N] if world == 1 else [10, 15, 20]
lo = sum(sizes[:rank])
hi = lo + sizes[rank]
keep = (dst >= lo) & (dst < hi)
e_src, e_dst = src[keep], dst[keep] - lo


class AllNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        full = x.new_zeros(N, x.shape[1])
        full[lo:hi] = x
        dist.all_reduce(full)
        return full

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[lo:hi]


class Conv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_, self.nbr = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x):
        everyone = AllNodes.apply(x) if world > 1 else x
        w = (deg[e_src] * deg[e_dst + lo]).rsqrt()[:, None]
        agg = torch.zeros_like(x).index_add(0, e_dst, everyone[e_src] * w)
        return self.self_(x) + self.nbr(agg)


torch.manual_seed(9)
net = nn.Sequential(Conv(FEAT, HID), nn.ELU(), Conv(HID, HID), nn.ELU(), Conv(HID, CLS))
opt = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=5e-4)
total = train.sum()
x, y, mask = feats[lo:hi], labels[lo:hi], train[lo:hi]
for step in range(1, 6):
    out = net(x)
    loss = F.cross_entropy(out[mask], y[mask], reduction="sum") / total
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
