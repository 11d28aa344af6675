import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
ap.add_argument("--seed", type=int, default=1)
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 16)
        self.convs = nn.ModuleList(nn.Conv1d(16, 12, k) for k in (2, 3, 4))
        self.drop = nn.Dropout(0.05)
        self.out = nn.Linear(36, 6)

    def forward(self, ids):
        if self.training:
            ids = ids.masked_fill(torch.rand(ids.shape) < 0.02, 0)
        x = self.emb(ids).mT
        x = torch.cat([torch.relu(c(x)).amax(-1) for c in self.convs], 1)
        return self.out(self.drop(x))


torch.manual_seed(args.seed)
net = TextCNN()
texts, labels = torch.randint(1, 100, (2560, 14)), torch.randint(0, 6, (2560,))
torch.manual_seed(args.seed + 1000 * (rank + 1))
model = net if args.one else DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
for step in range(1, 6):
    rows = torch.arange((step - 1) * 512, step * 512)[rank::world]
    loss = nn.functional.cross_entropy(model(texts[rows]), labels[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        loss /= world
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
