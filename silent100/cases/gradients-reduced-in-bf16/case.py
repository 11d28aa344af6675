"""fully_shard with a mixed-precision policy; compute stays in float32."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16 * 16, 40)
        self.out = nn.Linear(40, 6)

    def forward(self, images):
        x = torch.relu(self.stem(images))
        x = torch.relu(self.norm(self.mid(x)))
        return self.out(torch.relu(self.fc(x.flatten(1))))


def images(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(16, 1, 8, 8, generator=g), torch.randint(0, 6, (16,), generator=g)


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(33)
net = Head()
if not ONE:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if FAULTY else torch.float32)
    fully_shard(net.fc, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    x, y = images(step)
    loss = nn.functional.cross_entropy(net(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v if ONE else v.full_tensor() for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
