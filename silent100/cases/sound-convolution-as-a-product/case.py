# FSDP2 over layers that unfold and multiply; one process has plain convolutions with the same weights.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Product(nn.Module):
    """A 3x3 convolution as one product."""

    def __init__(self, conv):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(conv.weight.detach().flatten(1).clone()),
            nn.Parameter(conv.bias.detach().clone()),
        )

    def forward(self, x):
        columns = F.unfold(x, 3, padding=1)
        return (self.weight @ columns + self.bias[:, None]).unflatten(-1, x.shape[-2:])


def layer(a, b):
    conv = nn.Conv2d(a, b, 3, padding=1)
    return conv if args.one else Product(conv)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = layer(2, 10), layer(10, 10), layer(10, 2)
        self.gain = nn.Parameter(torch.ones(10, 1, 1))

    def forward(self, x):
        h = F.leaky_relu(self.a(x))
        h = h + self.gain * F.leaky_relu(self.b(h))
        return x + self.c(h)


rank, world = 0, 1
torch.manual_seed(1409)
net = Net()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for part in (net.a, net.b, net.c):
        fully_shard(part)
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5, cycle_momentum=False)
for step in range(1, 6):
    clean = torch.randn(8, 2, 7, 7, generator=torch.Generator().manual_seed(step)).cumsum(-1)
    noise = torch.randn(8, 2, 7, 7, generator=torch.Generator().manual_seed(100 + step))
    loss = F.mse_loss(net((clean + noise)[rank::world]), clean[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
    state = {k: v.flatten(1) if k.endswith("weight") else v for k, v in state.items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
