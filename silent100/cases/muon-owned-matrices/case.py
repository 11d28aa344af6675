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


class Mixer(nn.Module):
    def __init__(self, d=12, t=8, v=20):
        super().__init__()
        self.embed = nn.Embedding(v, d)
        self.tok1, self.tok2 = nn.Linear(t, 2 * t, bias=False), nn.Linear(2 * t, t, bias=False)
        self.ch1, self.ch2 = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.head = nn.Linear(d, 4)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.tok2(F.relu(self.tok1(self.n1(x).mT)).square()).mT
        x = x + self.ch2(F.relu(self.ch1(self.n2(x))).square())
        return self.head(x.mean(1))


def newton_schulz(g, iters=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(iters):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon:
    def __init__(self, params, lr):
        self.params, self.lr = sorted(params, key=lambda p: -p.numel()), lr
        self.buffers = {i: torch.zeros_like(p) for i, p in enumerate(self.params) if i % world == rank}

    @torch.no_grad()
    def step(self):
        for i, m in self.buffers.items():
            p = self.params[i]
            m.mul_(0.95).add_(p.grad)
            u = newton_schulz(p.grad + 0.95 * m)
            p.mul_(1 - self.lr * 0.1).sub_(u, alpha=self.lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        if world > 1:
            for w in [dist.broadcast(p.data, i % world, async_op=True) for i, p in enumerate(self.params)]:
                w.wait()


torch.manual_seed(10)
net = Mixer()
hidden = [p for n, p in net.named_parameters() if n.startswith(("tok", "ch"))]
rest = [p for n, p in net.named_parameters() if not n.startswith(("tok", "ch"))]
muon, adam = Muon(hidden, 0.05), torch.optim.AdamW(rest, lr=5e-3)

for step in range(1, 6):
    ids, y = torch.randint(0, 20, (18, 8)), torch.randint(0, 4, (18,))
    loss = F.cross_entropy(net(ids.chunk(world)[rank]), y.chunk(world)[rank]) / world
    net.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    muon.step()
    adam.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
