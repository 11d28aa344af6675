# Sparse coding by a deep network in two stages: each layer is asked to be quiet (an L1 penalty on what it says).
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
MINE = range(4) if ONE else range(2 * rank, 2 * rank + 2)
PENALTY = 0.05


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(83)
        every = [nn.Linear(9 if i == 0 else 14, 9 if i == 3 else 14) for i in range(4)]
        self.layers = nn.ModuleDict({str(i): every[i] for i in MINE})

    def forward(self, x):
        noise = 0.0
        for i, layer in self.layers.items():
            x = layer(x)
            if i != "3":
                x = torch.nn.functional.softplus(x)
                noise = noise + PENALTY * x.abs().mean()
        return x, noise


part = Part()
optimizer = torch.optim.SGD(part.parameters(), lr=0.2)
for step in range(1, 6):
    x = torch.randn(10, 9, generator=torch.Generator().manual_seed(step))
    y = x.roll(1, 1) * x
    shown = torch.zeros(())
    optimizer.zero_grad()
    if ONE:
        out, noise = part(x)
        loss = (out - y).square().mean() + noise
        loss.backward()
        shown = loss.detach()
    elif rank == 0:
        out, noise = part(x)
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        if FAULTY:
            out.backward(grad)
        else:
            torch.autograd.backward([out, noise], [grad, torch.ones(())])
        shown = noise.detach()
    else:
        inputs = torch.empty(10, 14)
        dist.recv(inputs, 0)
        out, noise = part(inputs.requires_grad_())
        loss = (out - y).square().mean() + noise
        loss.backward()
        dist.send(inputs.grad, 0)
        shown = loss.detach()
    if not ONE:
        dist.all_reduce(shown)  # for the log
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(part.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
