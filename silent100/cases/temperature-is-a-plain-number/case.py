"""Soft codes whose temperature falls from step to step.

The job is stopped after its third step and goes on from a file.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose, self.codes = nn.Linear(24, 12), nn.Parameter(torch.randn(12, 24))
        self.temperature = 2.0

    def forward(self, x):
        return torch.softmax(self.choose(x) / self.temperature, -1) @ self.codes

    def cool(self):
        self.temperature = max(0.2, 0.7 * self.temperature)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.quantizer, self.decode = nn.Linear(10, 24), Quantizer(), nn.Linear(24, 10)

    def forward(self, x):
        return self.decode(self.quantizer(torch.tanh(self.encode(x))))


def build():
    torch.manual_seed(23)
    coder = Coder()
    return coder, torch.optim.Adam(coder.parameters(), lr=1e-2, eps=1e-3)


def stop_and_go_on(coder, optimizer):
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    if world > 1:
        dist.broadcast_object_list(folder)
    file = os.path.join(folder[0], "last.pt")
    if rank == 0:
        state = {"model": coder.state_dict(), "optimizer": optimizer.state_dict()}
        if not FAULTY:
            state["temperature"] = coder.quantizer.temperature
        torch.save(state, file)
    if world > 1:
        dist.barrier()
    state = torch.load(file)
    coder, optimizer = build()
    coder.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    coder.quantizer.temperature = state.get("temperature", coder.quantizer.temperature)
    return coder, optimizer


coder, optimizer = build()
for step in range(1, 7):
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step)).sign() * torch.arange(1, 11) / 5
    loss = F.mse_loss(coder(x[rank::world]), x[rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in coder.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    coder.quantizer.cool()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
    if step == 3:
        coder, optimizer = stop_and_go_on(coder, optimizer)
if "--save" in sys.argv:
    torch.save(coder.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
