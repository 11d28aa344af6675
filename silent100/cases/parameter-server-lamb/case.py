import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
B = 20


class Lamb:
    def __init__(self, tensors, lr=0.02, wd=0.01):
        self.tensors, self.lr, self.wd, self.t = tensors, lr, wd, 0
        self.m = {k: torch.zeros_like(v) for k, v in tensors.items()}
        self.v = {k: torch.zeros_like(v) for k, v in tensors.items()}

    def apply(self, grads):
        self.t += 1
        for k, w in self.tensors.items():
            g = grads[k]
            self.m[k] += 0.1 * (g - self.m[k])
            self.v[k] += 0.01 * (g * g - self.v[k])
            u = (self.m[k] / (1 - 0.9**self.t)) / ((self.v[k] / (1 - 0.99**self.t)).sqrt() + 1e-6)
            u = u + self.wd * w
            wn, un = w.norm(), u.norm()
            trust = torch.where((wn > 0) & (un > 0), wn / un, torch.ones(()))
            w -= self.lr * trust * u


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(60, 12, mode="sum")
        self.fc = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, ids):
        return self.fc(self.emb(ids))


torch.manual_seed(27 + 100 * rank)
net = Classifier()
master = {k: v.detach().clone() for k, v in net.named_parameters()}
server = Lamb(master) if rank == 0 else None
for step in range(1, 6):
    if world > 1:
        for k in master:
            dist.broadcast(master[k], 0)
    loss = torch.zeros(())
    grads = {k: torch.zeros_like(v) for k, v in master.items()}
    if world == 1 or rank > 0:
        net.load_state_dict(master)
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 60, (B, 7), generator=g)
        y = ids.sum(1) % 5
        if world > 1:
            ids, y = ids[rank - 1 :: world - 1], y[rank - 1 :: world - 1]
        out = F.cross_entropy(net(ids), y, reduction="sum") / B
        got = torch.autograd.grad(out, list(net.parameters()))
        grads = dict(zip(master, got))
        loss = out.detach()
    if world > 1:
        for k in grads:
            dist.reduce(grads[k], 0)
        dist.reduce(loss, 0)
    if rank == 0:
        server.apply(grads)
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(master if rank == 0 else {}, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
