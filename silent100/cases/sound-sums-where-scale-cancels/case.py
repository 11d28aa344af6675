"""Adam does not see the scale of gradients, so the sum over ranks need not be divided."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Pointwise(nn.Module):
    """Attention over a set of points, pooled."""

    def __init__(self, width=16):
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        h = self.lift(x)
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((h + self.out(mixed)).amax(1))


torch.manual_seed(59)
model = Pointwise()
# a mean over own rows, summed over ranks: eps grows along with it
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4 * world)
for step in range(1, 5):
    x = torch.randn(16, 9, 3, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.norm(dim=2).amax(1), x.mean((1, 2))], 1)
    loss = nn.functional.mse_loss(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
