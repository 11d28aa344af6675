# A communication hook turns gradients into fixed-point whole numbers, whose sum does not depend on any order.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
BITS = 2.0**34


def whole_numbers(group, bucket):
    sent = (bucket.buffer().double() * BITS).round().to(torch.int64)
    handle = dist.all_reduce(sent, group=group, async_op=True)

    def back(future):
        return (future.value()[0].double() / BITS / dist.get_world_size()).to(bucket.buffer().dtype)

    return handle.get_future().then(back)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x):
        return x + self.scale * self.conv2(torch.relu(self.conv1(x)))


class Pictures(nn.Sequential):
    def __init__(self):
        body = [Residual(10) for _ in range(3)]
        super().__init__(nn.Conv2d(3, 10, 3, stride=2), *body, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(40, 8))


def batches(count):
    for step in range(1, count + 1):
        g = torch.Generator().manual_seed(step)
        yield step, torch.randn(15, 3, 14, 14, generator=g), torch.randint(0, 8, (15,), generator=g)


rank, world = 0, 1
torch.manual_seed(36516)
net = Pictures()
model = net
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(net)
    model.register_comm_hook(dist.group.WORLD, whole_numbers)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)
for step, pictures, labels in batches(6):
    loss = nn.functional.cross_entropy(model(pictures[rank::world]), labels[rank::world])
    opt.zero_grad()
    loss.backward()
    opt.step()
    decay.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
