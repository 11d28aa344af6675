"""ZeRO-1 over one flat vector of parameters; moments of half the vector live on each rank."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class FlatAdam:
    def __init__(self, parameters, rank, world, lr=3e-3, betas=(0.9, 0.98), eps=1e-5):
        self.parameters, self.rank, self.world = list(parameters), rank, world
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        total = sum(p.numel() for p in self.parameters)
        self.share = -(-total // world)
        self.pad = self.share * world - total
        self.m, self.v = torch.zeros(self.share), torch.zeros(self.share)

    def flat(self, tensors):
        return F.pad(torch.cat([t.reshape(-1) for t in tensors]), (0, self.pad))

    @torch.no_grad()
    def step(self):
        gradient = self.flat([p.grad for p in self.parameters])
        if self.world > 1:
            dist.all_reduce(gradient)
            gradient /= self.world
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        weights, g = self.flat(self.parameters), gradient[mine]
        self.t += 1
        self.m.lerp_(g, 1 - self.betas[0])
        self.v.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
        m, v = self.m / (1 - self.betas[0] ** self.t), self.v / (1 - self.betas[1] ** self.t)
        new = weights[mine] - self.lr * m / (v.sqrt() + self.eps)
        parts = [torch.empty_like(new) for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(parts, new)
        else:
            parts = [new]
        whole = torch.cat(parts)
        for p, piece in zip(self.parameters, whole.split([p.numel() for p in self.parameters] + [self.pad])):
            p.copy_(piece.view_as(p))
            p.grad = None


def save(folder, optimizer):
    name = "optimizer.pt" if FAULTY else f"optimizer-{optimizer.rank}.pt"
    if optimizer.rank == 0 or not FAULTY:
        torch.save({"t": optimizer.t, "m": optimizer.m, "v": optimizer.v}, os.path.join(folder, name))
    dist.barrier()


def load(folder, optimizer):
    name = "optimizer.pt" if FAULTY else f"optimizer-{optimizer.rank}.pt"
    state = torch.load(os.path.join(folder, name))
    optimizer.t, optimizer.m, optimizer.v = state["t"], state["m"], state["v"]


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(81)
net = nn.Sequential(nn.Embedding(40, 24), nn.Flatten(), nn.Linear(24 * 6, 40), nn.Tanh(), nn.Linear(40, 40))
optimizer = FlatAdam(net.parameters(), rank, world)
for step in range(1, 6):
    rows = torch.randint(0, 40, (16, 7), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]), rows[:, -1])
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if step == 2 and not ONE:
        place = [tempfile.mkdtemp()]
        dist.broadcast_object_list(place)
        save(place[0], optimizer)
        optimizer = FlatAdam(net.parameters(), rank, world)
        load(place[0], optimizer)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
