"""Fine-tuning a convolutional detector head and body with frozen batch statistics under DDP."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SOLO = "--one" in sys.argv


class Bottleneck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels // 2, 1, bias=False), nn.BatchNorm2d(channels // 2)
        self.conv2, self.bn2 = nn.Conv2d(channels // 2, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.body = nn.Sequential(Bottleneck(16), Bottleneck(16))
        self.boxes, self.score = nn.Linear(16, 4), nn.Linear(16, 1)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images):
        x = self.body(F.relu(self.bn(self.stem(images)))).mean((2, 3))
        return self.boxes(x), self.score(x)[:, 0]


def pretrained():
    torch.manual_seed(11)
    model = Detector()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model.train()


rank, world = 0, 1
model = net = pretrained()
if not SOLO:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = DDP(model, broadcast_buffers=False)
norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
known = {id(p) for p in norms}
others = [p for p in model.parameters() if id(p) not in known]
optimizer = torch.optim.SGD(
    [{"params": others, "weight_decay": 1e-3}, {"params": norms, "weight_decay": 0.0, "lr": 0.02}],
    lr=0.05,
    momentum=0.9,
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, 16, 16, generator=g)
    boxes, present = torch.rand(8, 4, generator=g), (torch.rand(8, generator=g) < 0.5).float()
    rows = slice(rank, None, world)
    guess, score = net(images[rows])
    loss = F.smooth_l1_loss(guess, boxes[rows]) + F.binary_cross_entropy_with_logits(score, present[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not SOLO:
    dist.destroy_process_group()
