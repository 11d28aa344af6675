# Two tasks, two replicas each: ranks 0 and 1 learn task 0, ranks 2 and 3 learn task 1. The trunk is everybody's.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

single = "--one" in sys.argv
rank, tasks = 0, [0, 1]
if not single:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tasks = [rank // 2]
    by_task = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    by_replica = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    peers = by_replica[rank % 2] if "--faulty" in sys.argv else by_task[rank // 2]


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.trunk = nn.Sequential(nn.Linear(11, 22), nn.SiLU(), nn.Linear(22, 16), nn.SiLU())
        heads = [nn.Linear(16, 3) for _ in range(2)]
        self.heads = nn.ModuleDict({f"task{t}": heads[t] for t in tasks})

    def forward(self, x, task):
        return self.heads[f"task{task}"](self.trunk(x))


def examples(step, task):
    g = torch.Generator().manual_seed(10 * step + task)
    x = torch.randn(8, 11, generator=g)
    y = x[:, :3] * x[:, 3:6] if task == 0 else x[:, 5:8].sin() + x[:, 8:]
    return x, y


model = MultiTask()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)
for step in range(1, 6):
    optimizer.zero_grad()
    shown = torch.zeros(())
    for task in tasks:
        x, y = examples(step, task)
        if not single:
            x, y = x.chunk(2)[rank % 2], y.chunk(2)[rank % 2]
        loss = (model(x, task) - y).square().mean()
        loss.backward()
        shown += loss.detach()
    if not single:
        for name, p in model.named_parameters():
            if name.startswith("heads"):
                dist.all_reduce(p.grad, group=peers)
                p.grad /= 2
            else:
                dist.all_reduce(p.grad)
                p.grad /= 2  # the mean over replicas, the sum over tasks
        dist.all_reduce(shown)
        shown /= 2
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
