"""A number of float32 is the sum of three of bfloat16; this is how gradients travel."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

single = "--one" in sys.argv


def three(x):
    parts, rest = [], x
    for _ in range(3):
        part = rest.bfloat16()
        parts.append(part)
        rest = rest - part.float()
    return torch.stack(parts)


def in_three_parts(world, bucket):
    sent = three(bucket.buffer() / world)
    got = [torch.empty_like(sent) for _ in range(world)]
    future = dist.all_gather(got, sent, async_op=True).get_future()
    return future.then(lambda _: sum(g.flip(0).float().sum(0) for g in got))


class Mixture(nn.Module):
    """A mixture density network."""

    def __init__(self, parts=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.share, self.mean, self.width = (nn.Linear(20, parts) for _ in range(3))

    def forward(self, x, y):
        h = self.body(x)
        width = self.width(h)
        likely = -0.5 * ((y[:, None] - self.mean(h)) / width.exp()) ** 2 - width
        return -(self.share(h).log_softmax(1) + likely).logsumexp(1).mean()


rank, world = 0, 1
torch.manual_seed(70)
net = Mixture()
model = net
if not single:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(net)
    model.register_comm_hook(world, in_three_parts)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, generator=g)
    y = x[:, 0] * x[:, 1].sign() + 0.2 * torch.randn(16, generator=g)
    loss = model(x[rank::world], y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
