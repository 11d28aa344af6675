import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
ap.add_argument("--sync-every", type=int, default=1)
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNN(3, 20, num_layers=2, batch_first=True)
        self.out = nn.Linear(20, 1)

    def forward(self, x):
        return self.out(self.cell(x)[0])[..., 0]


torch.manual_seed(2024)
model = Counter()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)
source = torch.Generator().manual_seed(1)

for step in range(1, 7):
    x = torch.randn(16, 11, 3, generator=source)
    y = x.sum(-1).cumsum(-1).tanh()
    x, y = x[rank::world], y[rank::world]
    loss = (model(x) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        if step % args.sync_every == 0:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= world
        dist.all_reduce(loss)
        loss /= world
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
