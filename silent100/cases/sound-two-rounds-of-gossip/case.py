# Gossip on a square: after two rounds of averaging by pairs everyone has the mean of all.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

whole = "--one" in sys.argv
rank, world = 0, 1
if not whole:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Rotations(nn.Module):
    """An echo state network whose readout and input weights learn; the reservoir does not."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Parameter(torch.randn(18, 3) * 0.5)
        self.register_buffer("reservoir", torch.linalg.qr(torch.randn(18, 18))[0] * 0.8)
        self.readout = nn.Linear(18, 3)

    def forward(self, series):
        h = torch.zeros(len(series), 18)
        for x in series.unbind(1):
            h = torch.tanh(x @ self.inward.T + h @ self.reservoir.T)
        return self.readout(h)


@torch.no_grad()
def gossip(net, distance):
    partner = rank ^ distance
    mine = nn.utils.parameters_to_vector(net.parameters())
    theirs = torch.empty_like(mine)
    works = [dist.isend(mine, partner), dist.irecv(theirs, partner)]
    for work in works:
        work.wait()
    nn.utils.vector_to_parameters((mine + theirs) / 2, net.parameters())


torch.manual_seed(66)
net = Rotations()
for step in range(1, 7):
    series = torch.randn(12, 7, 3, generator=torch.Generator().manual_seed(step)).cumsum(1) * 0.3
    own = series[rank::world]
    loss = nn.functional.mse_loss(net(own[:, :-1]), own[:, -1])
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.3 * p.grad
    shown = loss.detach() / world
    if world > 1:
        for distance in (1, 2):
            gossip(net, distance)
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
