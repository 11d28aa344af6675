import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Expand(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(d, h), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


torch.manual_seed(303)
net = nn.Sequential(nn.Embedding(30, 12), Expand(12, 20), Expand(12, 20))
value = nn.Linear(12, 1)
if not args.one:
    mesh = init_device_mesh("cpu", (world,))
    plan = {}
    for i in ("1", "2"):
        plan.update({f"{i}.up": ColwiseParallel(), f"{i}.gate": ColwiseParallel(), f"{i}.down": RowwiseParallel()})
    plan["0"] = RowwiseParallel(input_layouts=torch.distributed.tensor.Replicate())
    parallelize_module(net, mesh, plan)
split = list(net.parameters())
opts = [torch.optim.Adagrad(split, lr=0.05, foreach=False), torch.optim.SGD(value.parameters(), lr=0.05, momentum=0.5)]

for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (10, 6), generator=g)
    y = (ids.float().mean(1, keepdim=True) - 14.5) / 5
    out = value(net(ids).amax(1))
    loss = F.huber_loss(out, y)
    for o in opts:
        o.zero_grad()
    loss.backward()
    for o in opts:
        o.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()}
    state.update({f"value.{k}": v for k, v in value.state_dict().items()})
    torch.save(state, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
