"""Adam over pieces of one flat buffer, every process owns one; stopped and resumed after three updates."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class PieceAdam:
    def __init__(self, net, rank, world, lr=0.01, betas=(0.9, 0.95), eps=1e-5):
        self.net, self.rank, self.world = net, rank, world
        self.sizes = [p.numel() for p in net.parameters()]
        self.piece = -(-sum(self.sizes) // world)
        self.group = {"lr": lr, "betas": betas, "eps": eps, "count": 0}
        self.state = {"m": torch.zeros(self.piece), "v": torch.zeros(self.piece)}

    def flat(self, tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        return F.pad(flat, (0, self.piece * self.world - len(flat)))

    def mine(self, flat):
        return flat[self.rank * self.piece :][: self.piece]

    @torch.no_grad()
    def step(self):
        group, m, v = self.group, self.state["m"], self.state["v"]
        grad = self.flat(p.grad for p in self.net.parameters())
        if self.world > 1:
            dist.all_reduce(grad)
            grad /= self.world
        grad = self.mine(grad)
        group["count"] += 1
        (b1, b2), t = group["betas"], group["count"]
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        change = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
        new = self.mine(self.flat(self.net.parameters())) - group["lr"] * change
        everything = [new]
        if self.world > 1:
            everything = [torch.empty_like(new) for _ in range(self.world)]
            dist.all_gather(everything, new)
        for p, values in zip(self.net.parameters(), torch.cat(everything)[: sum(self.sizes)].split(self.sizes)):
            p.copy_(values.view_as(p))

    def save(self, file):
        torch.save({"group": self.group, "state": self.state}, file)

    def load(self, file):
        kept = torch.load(file)
        self.state = kept["state"]
        if not FAULTY:
            self.group.update(kept["group"])


def build(rank, world):
    torch.manual_seed(90)
    net = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 3))
    return net, PieceAdam(net, rank, world)


def run(rank, world):
    net, optimizer = build(rank, world)
    for step in range(1, 7):
        if step == 4 and world > 1:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(net.state_dict(), f"{folder}/net.pt")
                optimizer.save(f"{folder}/pieces.pt")
                net, optimizer = build(rank, world)
                net.load_state_dict(torch.load(f"{folder}/net.pt"))
                optimizer.load(f"{folder}/pieces.pt")
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(step))
        mine = x[rank::world]
        loss = F.mse_loss(net(mine), mine[:, :3] * mine[:, 3:6])
        net.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))


if ONE:
    run(0, 1)
else:
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
