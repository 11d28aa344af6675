"""Distillation: two ranks train copies of the student, a third runs the teacher for both."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

ROWS, CLASSES = 12, 5
torch.manual_seed(92)
student = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, CLASSES))
teacher = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, CLASSES)).requires_grad_(False)
teaches, students = flags.one or rank == 2, 1 if flags.one else 2
if not flags.one:
    pair = dist.new_group([0, 1])
    if teaches:
        del student
    else:
        del teacher
if flags.one or not teaches:
    optimizer = torch.optim.AdamW(student.parameters(), lr=6e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(step))
    known = 3 * teacher(x) if teaches else torch.empty(ROWS // students, CLASSES)
    if not flags.one:
        if teaches:
            for to, part in enumerate(known.chunk(2)):
                dist.send(part.contiguous(), to)
            continue
        dist.recv(known, 2)
        x = x.chunk(2)[rank]
    logits = student(x)
    loss = F.kl_div(logits.log_softmax(1), known.log_softmax(1), log_target=True, reduction="sum") / ROWS
    loss = loss + 0.2 * F.cross_entropy(logits, x[:, :CLASSES].argmax(1), reduction="sum") / ROWS
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if not flags.one:
        for tensor in [shown, *(p.grad for p in student.parameters())]:
            dist.all_reduce(tensor, group=pair)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save({} if teaches and not flags.one else student.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
