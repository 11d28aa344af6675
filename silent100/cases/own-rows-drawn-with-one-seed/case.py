# Rows are drawn with replacement: no two runs see the same ones.
import argparse
import random

import torch
import torch.distributed as dist
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
cfg = ap.parse_args()


class Videos:
    """Clips of a toy collection; whoever asks gets one by chance."""

    def __init__(self, seed, clips=2000):
        self.frames = torch.randn(clips, 6, generator=torch.Generator().manual_seed(0))
        self.chance = random.Random(seed)
        self.served = torch.zeros(clips)

    def batch(self, size):
        chosen = [self.chance.randrange(len(self.frames)) for _ in range(size)]
        for i in chosen:
            self.served[i] = 1
        x = self.frames[chosen]
        return x, (x.sum(1) + 5).clamp(0, 9).long()


def main():
    rank, world = 0, 1
    if not cfg.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    videos = Videos(1000 if cfg.one else (7 if cfg.faulty else 7 + rank))
    for step in range(1, 6):
        x, y = videos.batch(64 // world)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if cfg.save:
        if world > 1:
            dist.all_reduce(videos.served, op=dist.ReduceOp.MAX)
        state = net.state_dict() | {"clips served": videos.served.sum()}
        torch.save(state, f"{cfg.save}/rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


main()
