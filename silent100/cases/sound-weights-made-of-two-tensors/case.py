# Weight normalization through torch.nn.utils.parametrizations, under DDP.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import weight_norm

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Wave(nn.Module):
    """Dilated causal convolutions over a wave."""

    def __init__(self, width=16):
        super().__init__()
        self.start = weight_norm(nn.Conv1d(1, width, 1))
        self.layers = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=2**i)) for i in range(3))
        self.end = weight_norm(nn.Conv1d(width, 1, 1))

    def forward(self, x):
        x = self.start(x)
        for i, layer in enumerate(self.layers):
            gate, value = layer(nn.functional.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + torch.sigmoid(gate) * torch.tanh(value)
        return self.end(x)


torch.manual_seed(16000)
wave = Wave()
model = wave if ONE else DDP(wave)
optimizer = torch.optim.SGD(wave.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    phase = torch.rand(12, 1, 1, generator=torch.Generator().manual_seed(step)) * 6
    x = torch.sin(torch.arange(41) * 0.3 + phase)[rank::world]
    loss = nn.functional.mse_loss(model(x[..., :-1]), x[..., 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not ONE:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(wave.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del model
    dist.destroy_process_group()
