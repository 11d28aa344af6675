"""A gated network cut over two ranks, with torch's GradScaler; halves of a layer may overflow alone."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Cut(nn.Module):
    """A rank's half of two layers and their sum."""

    def __init__(self):
        super().__init__()
        up, down = nn.Linear(12, 32), nn.Linear(32, 4, bias=False)
        self.up, self.down = nn.Linear(12, 32 // world), nn.Linear(32 // world, 4, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(world)[rank])
            self.up.bias.copy_(up.bias.chunk(world)[rank])
            self.down.weight.copy_(down.weight.chunk(world, 1)[rank])

    def forward(self, x):
        x = self.down(torch.tanh(self.up(x)))
        return x if ONE else Sum.apply(x)


class Scaler(torch.amp.GradScaler):
    """Finds what is not finite on any rank."""

    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad.half().float()
        super().unscale_(optimizer)
        if not ONE and not FAULTY:
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(flag)


torch.manual_seed(64)
net = Cut()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = Scaler("cpu", init_scale=4096.0, growth_interval=100)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 12, generator=g), torch.randn(16, 4, generator=g)
    optimizer.zero_grad()
    said = net(x)
    loss = (said - y).square().mean()
    aim = loss
    if step == 3:
        # One unit of the last half is pushed far too hard
        weight = net.up.bias[-1]
        aim = loss + (50.0 if rank == world - 1 else 0.0) * weight
    scaler.scale(aim).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    state = {name: (p, dims[name], rank, world) for name, p in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
