import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(60)
gen = torch.Generator().manual_seed(2)
images = torch.randn(40, 3, 10, 10, generator=gen)
labels = (images.mean((1, 2, 3)) > 0).long()


def augment(img, seed):
    g = torch.Generator().manual_seed(seed)
    if torch.rand((), generator=g) < 0.5:
        img = img.flip(-1)
    dx, dy = torch.randint(0, 3, (2,), generator=g).tolist()
    img = F.pad(img, (1, 1, 1, 1))[:, dy : dy + 10, dx : dx + 10]
    return img * (0.8 + 0.4 * torch.rand((), generator=g))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.fc = nn.GroupNorm(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.norm(self.body(F.relu(self.stem(x)))).relu().mean((2, 3)))


model = Net()
net = model if args.one else DDP(model, gradient_as_bucket_view=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
order = torch.randperm(40, generator=gen)
B = 8
for step in range(1, 5):
    batch = order[(step - 1) * B : step * B]
    slots = list(range(B))[rank * B // world : (rank + 1) * B // world]
    first = 0 if args.faulty else slots[0]
    x = torch.stack([augment(images[batch[s]], 1000 * step + first + j) for j, s in enumerate(slots)])
    loss = F.cross_entropy(net(x), labels[batch[slots]])
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
