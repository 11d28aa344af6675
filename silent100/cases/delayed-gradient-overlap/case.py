import argparse

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


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(16, 6) * 0.3)
        self.b1, self.b2 = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return torch.sigmoid(x @ self.w1 + self.b1) @ self.w1.T + self.b2


class Delayed:
    """Signed-momentum steps with the gradient of the step before."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.m = [torch.zeros_like(p) for p in self.params]
        self.pending = None

    @torch.no_grad()
    def step(self):
        ready, self.pending = self.pending, self.launch()
        if ready is not None:
            self.apply(ready)

    def launch(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        if world == 1:
            return flat, None
        flat /= world
        return flat, dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def apply(self, ready):
        flat, work = ready
        if work is not None:
            work.wait()
        for p, m, g in zip(self.params, self.m, flat.split([p.numel() for p in self.params])):
            m.mul_(0.7).add_(g.view_as(p))
            p.sub_(self.lr * m / (1 + m.abs()))

    def flush(self):
        if self.pending is not None:
            self.apply(self.pending)
            self.pending = None


torch.manual_seed(50)
net = Autoencoder()
opt = Delayed(net.parameters(), lr=0.1)
data = torch.randn(120, 16) @ torch.randn(16, 16) * 0.3
for step in range(1, 7):
    x = data[(step - 1) * 20 : step * 20].chunk(world)[rank]
    loss = (net(x) - x).square().sum(1).mean()
    net.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        loss /= world
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
opt.flush()

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
