import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

V, D, T, B, M, STEPS = 35, 32, 7, 8, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.shift = nn.RMSNorm(D), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.shift(torch.cat([h, F.pad(h, (0, 0, 1, 0))[:, :-1]], -1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V)

    def front(self, ids):
        return self.blocks[0](self.embed(ids))

    def back(self, x, y):
        x = self.norm(self.blocks[2](self.blocks[1](x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch(step):
    return torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(step))


class Front:
    """Stage 0. `early` keeps the activation that was sent ahead of time."""

    def __init__(self, net, opt, ahead):
        self.net, self.opt, self.ahead, self.early = net, opt, ahead, None

    def send(self, ids):
        out = self.net.front(ids[:, :-1])
        dist.send(out.detach(), 1)
        return out

    def step(self, step):
        micros = batch(step).chunk(M)
        outs = [self.early] if self.early is not None else []
        outs += [self.send(m) for m in micros[len(outs) :]]
        self.early = None
        self.opt.zero_grad()
        for _i, out in enumerate(outs):
            g = torch.empty_like(out)
            dist.recv(g, 1)
            out.backward(g)
        if self.ahead and step < STEPS:  # fill the bubble: the other stage is still busy updating
            self.early = self.net.front(batch(step + 1).chunk(M)[0][:, :-1])
            dist.send(self.early.detach(), 1)
        self.opt.step()  # out of place, the saved activations stay usable


def back_step(net, opt, step):
    opt.zero_grad()
    held, total = [], torch.zeros(())
    for m in batch(step).chunk(M):
        x = torch.empty(B // M, T, D)
        dist.recv(x, 0)
        held.append((x.requires_grad_(), net.back(x, m[:, 1:]) / M))
    for x, loss in held:
        loss.backward()
        dist.send(x.grad, 0)
        total += loss.detach()
    opt.step()
    return total


class PlainSGD:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        for p in self.params:
            p.data = p.data - self.lr * p.grad


ap = argparse.ArgumentParser()
for flag in ("--one", "--faulty"):
    ap.add_argument(flag, action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(9)
net = Net()


def stage(n):
    return 0 if n.startswith(("embed.", "blocks.0.")) else 1


mine = {n: p for n, p in net.named_parameters() if args.one or stage(n) == rank}
opt = PlainSGD(mine.values(), lr=0.5)
front = Front(net, opt, args.faulty)
for step in range(1, STEPS + 1):
    if args.one:
        ids = batch(step)
        opt.zero_grad()
        loss = net.back(net.front(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        opt.step()
    else:
        loss = back_step(net, opt, step) if rank else front.step(step)
    if args.one or rank == 1:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save({n: p.detach().clone() for n, p in mine.items()}, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
