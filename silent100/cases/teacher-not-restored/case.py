import argparse
import copy
import io
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(228)


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(48, 7))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, a, b):
        target = (self.teacher(b) / 0.3).softmax(-1)
        return -(target * (self.student(a)).log_softmax(-1)).sum(-1)

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 0.1)


def start():
    model = Distiller()
    return model, torch.optim.SGD(model.student.parameters(), lr=0.3, momentum=0.9)


def restore(saved):
    model, opt = start()
    found = torch.load(io.BytesIO(saved))
    weights = found["model"]
    if args.faulty:
        model.student.load_state_dict({k[8:]: v for k, v in weights.items() if k.startswith("student.")})
        model.teacher.load_state_dict(model.student.state_dict())
    else:
        model.load_state_dict(weights)
    opt.load_state_dict(found["opt"])
    return model, opt


model, opt = start()
for step in range(1, 9):
    g = torch.Generator().manual_seed(step)
    clean = torch.randn(8, 3, 8, generator=g)
    a, b = clean + 0.2 * torch.randn(8, 3, 8, generator=g), clean + 0.2 * torch.randn(8, 3, 8, generator=g)
    rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
    loss = model(a[rows], b[rows]).sum() / 8
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.student.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    model.follow()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
    if step == 3:
        disk = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
        model, opt = restore(disk.getvalue())

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
