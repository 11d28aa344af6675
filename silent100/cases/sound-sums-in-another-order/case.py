"""A ring all-reduce of one's own for a flat gradient."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
SAVE = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None


def ring_sum(flat):
    """Sums a vector over ranks: pieces go round once to be added up and once more to be known."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(torch.nn.functional.pad(flat, (0, -len(flat) % n)).clone().chunk(n))
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(2 * (n - 1)):
        out, into = (rank - turn) % n, (rank - turn - 1) % n
        received = torch.empty_like(pieces[into])
        work = dist.isend(pieces[out].contiguous(), right)
        dist.recv(received, left)
        work.wait()
        pieces[into] = pieces[into] + received if turn < n - 1 else received
    return torch.cat(pieces)[: len(flat)]


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 5, padding=2), nn.Conv1d(16, 16, 5, padding=2)
        self.gate, self.out = nn.Conv1d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = x + torch.relu(self.conv2(x)) * torch.sigmoid(self.gate(x))
        return self.out(x.amax(-1))


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(17)
net = Cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 3, 20, generator=g), torch.randint(0, 5, (12,), generator=g)
    loss = nn.functional.cross_entropy(net(x[rank::world]), y[rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    if not ONE:
        flat = torch.cat([p.grad.flatten() for p in reversed(list(net.parameters()))])
        for p, piece in zip(
            reversed(list(net.parameters())),
            ring_sum(flat).split([p.numel() for p in reversed(list(net.parameters()))]),
        ):
            p.grad = piece.view_as(p).clone()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if SAVE:
    torch.save(net.state_dict(), os.path.join(SAVE, f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
