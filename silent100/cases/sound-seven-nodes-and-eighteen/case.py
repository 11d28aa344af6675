import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
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


torch.manual_seed(209)
gen = torch.Generator().manual_seed(9)
N = 31
adj = (torch.rand(N, N, generator=gen) < 0.15).float()
adj = ((adj + adj.T) > 0).float() + torch.eye(N)
adj = adj / adj.sum(1, keepdim=True)
feat = torch.randn(N, 8, generator=gen)
label = ((adj @ feat)[:, 0] > 0).long()
train = torch.arange(0, N - 6)
held_out = torch.arange(N - 6, N)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 2)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.two(adj @ F.relu(self.one(adj @ self.drop(x))))


model = GCN()
opt = torch.optim.Adam(model.parameters(), lr=2e-2, eps=1e-3)
# hub nodes go to rank 0, so the ranks have 7 and 18 training nodes
cut = [train[:7], train[7:]]
rows = train if args.one else cut[rank]
for step in range(1, 6):
    model.train()
    ce = F.cross_entropy(model(feat)[rows], label[rows], reduction="sum") / len(train)
    opt.zero_grad()
    ce.backward()
    for p in model.parameters():
        p.grad = total(p.grad)
    opt.step()
    say(step, total(ce))
    model.eval()
    with torch.no_grad():  # each rank looks at other nodes, with other noise
        noisy = feat + 0.1 * torch.randn(N, 8, generator=torch.Generator().manual_seed(rank + step))
        hits = (model(noisy)[held_out].argmax(-1) == label[held_out])[rank::world].float().mean()
finish(dict(model.named_parameters()))
