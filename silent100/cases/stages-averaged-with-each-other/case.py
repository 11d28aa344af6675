"""Two stages with two copies each: ranks 0 and 1 are one pipeline, ranks 2 and 3 the other."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

WIDTH = 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


torch.manual_seed(55)
blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
stage, copy = (0, 0) if ONE else (rank % 2, rank // 2)
if not ONE:
    for i in range(4):
        if i // 2 != stage:
            del blocks[str(i)]
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = neighbours[copy] if FAULTY else copies[stage]
last, share = ONE or stage == 1, 1 if ONE else 2
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    wanted = data.roll(1, 1) * data
    shown = torch.zeros(())
    optimizer.zero_grad()
    for x, y in zip(data[copy::share].chunk(2), wanted[copy::share].chunk(2)):
        if stage == 1:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = x
        for block in blocks.values():
            out = block(out)
        if last:
            loss = F.mse_loss(out, y) / 2
            loss.backward()
            shown += loss.detach() / share
        else:
            dist.send(out.detach(), rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        if stage == 1:
            dist.send(x.grad, rank - 1)
    if not ONE:
        for p in blocks.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {f"blocks.{n}": p.detach() for n, p in blocks.named_parameters()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
