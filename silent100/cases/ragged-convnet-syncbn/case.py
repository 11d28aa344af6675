import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)

if args.one:
    rank, world = 0, 1
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

B = 12
SHARES = {1: [12], 3: [6, 4, 2]}[world]
lo = sum(SHARES[:rank])
hi = lo + SHARES[rank]


class GlobalBatchNorm(nn.BatchNorm2d):
    """Batch statistics over the rows of all nodes, whatever each node holds."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        n = torch.tensor([x.numel() / x.shape[1]])
        dist.all_reduce(n)
        n = n.item()
        mean = all_reduce(x.sum((0, 2, 3))) / n
        var = all_reduce(((x - mean[None, :, None, None]) ** 2).sum((0, 2, 3))) / n
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        y = (x - mean[None, :, None, None]) * (var + self.eps).rsqrt()[None, :, None, None]
        return y * self.weight[None, :, None, None] + self.bias[None, :, None, None]


def convert(m):
    for name, child in m.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = GlobalBatchNorm(child.num_features)
            new.load_state_dict(child.state_dict())
            setattr(m, name, new)
        else:
            convert(child)
    return m


torch.manual_seed(3)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.SiLU(),
    nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(12),
    nn.SiLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(12, 5),
)
val_x, val_y = torch.randn(16, 3, 10, 10), torch.randint(0, 5, (16,))
if world > 1:
    net = convert(net)
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
data = torch.Generator().manual_seed(17)

for step in range(1, 6):
    x = torch.randn(B, 3, 10, 10, generator=data)
    y = torch.randint(0, 5, (B,), generator=data)
    net.train()
    loss = F.cross_entropy(net(x[lo:hi]), y[lo:hi], reduction="sum") / B
    opt.zero_grad()
    loss.backward()
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
        for p in net.parameters():
            dist.all_reduce(p.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
        net.eval()
        with torch.no_grad():
            print(f"  val {F.cross_entropy(net(val_x), val_y).item():.5f}")

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
