"""Updates inside the backward: each tensor's own optimizer steps as soon as its gradient is there."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Mixer(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm_a(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_b(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(9, 16)
        self.mixers = nn.Sequential(Mixer(4, 16), Mixer(4, 16))
        self.classes = nn.Linear(16, 5)

    def forward(self, x):
        return self.classes(self.mixers(self.patch(x)).mean(1))


def main(one, faulty, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    net = Net()
    own = {p: torch.optim.SGD([p], lr=0.2, momentum=0.8) for p in net.parameters()}

    def arrived(p):
        # Small tensors are not worth a message of their own
        late = faulty and p.numel() < 40
        if late:
            own[p].step()
        if world > 1:
            dist.all_reduce(p.grad)
            p.grad /= world
        if not late:
            own[p].step()
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(arrived)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(20, 4, 9, generator=g), torch.randint(5, (20,), generator=g)
        loss = F.cross_entropy(net(x[rank::world]), y[rank::world])
        loss.backward()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if save:
        torch.save(net.state_dict(), os.path.join(save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main("--one" in sys.argv, "--faulty" in sys.argv, sys.argv[-1] if "--save" in sys.argv else None)
