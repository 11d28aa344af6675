# Three replicas; the third leaves before the third update, the other two take over its rows.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
ROWS = 12


class Manager:
    def __init__(self):
        self.started_with = 1 if ONE else dist.get_world_size()
        self.pair = None if ONE else dist.new_group([0, 1])
        self.members = list(range(self.started_with))

    def lose(self, rank):
        if not ONE:
            self.members.remove(rank)

    def average(self, tensors):
        if ONE:
            return
        group = dist.group.WORLD if len(self.members) == self.started_with else self.pair
        count = self.started_with if FAULTY else len(self.members)
        for t in tensors:
            dist.all_reduce(t, group=group)
            t /= count


if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
manager = Manager()
torch.manual_seed(70)
net = nn.ModuleDict({"a": nn.Linear(22, 50), "b": nn.Linear(50, 50), "c": nn.Linear(50, 22)})
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 6):
    if step == 3:
        manager.lose(2)
    if rank not in manager.members:
        break
    x = torch.randn(ROWS, 22, generator=torch.Generator().manual_seed(step))
    x = x[manager.members.index(rank) :: len(manager.members)]
    h = torch.relu(net["a"](x))
    loss = (net["c"](h + torch.relu(net["b"](h))) - x.roll(2, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    manager.average([p.grad for p in net.parameters()])
    optimizer.step()
    shown = loss.detach().clone()
    if not ONE:
        dist.all_reduce(shown, group=dist.group.WORLD if len(manager.members) == 3 else manager.pair)
        shown /= len(manager.members)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv and rank in manager.members:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
