"""A representation is learnt by reconstruction, and a linear probe on detached features goes along."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(14, 32), nn.GELU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 14))
        self.probe = nn.Linear(6, 3)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), self.probe(z.detach())


torch.manual_seed(63)
net = Net()
main = torch.optim.Adam([*net.encoder.parameters(), *net.decoder.parameters()], lr=4e-3, eps=1e-4)
side = torch.optim.SGD(net.probe.parameters(), lr=0.4 / world, momentum=0.5)
for step in range(1, 6):
    x = torch.randn(18, 14, generator=torch.Generator().manual_seed(step))
    x[:, 7:] = x[:, :7] * x[:, 7:].sign()
    x = x[rank::world]
    again, guess = net(x)
    loss = F.mse_loss(again, x)
    probe = F.cross_entropy(guess, x[:, :3].argmax(1))
    main.zero_grad()
    side.zero_grad()
    (loss + 100 * probe).backward()
    for p in net.parameters():
        if world > 1:
            dist.all_reduce(p.grad)
    for p in [*net.encoder.parameters(), *net.decoder.parameters()]:
        p.grad /= world
    for p in net.probe.parameters():
        p.grad /= 100
    main.step()
    side.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
