import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(207)
ROWS, MICRO = 12, 4


class Mix(nn.Module):
    """MLP-mixer layer over 6 patches of width 10."""

    def __init__(self):
        super().__init__()
        self.token, self.chan = nn.Linear(6, 6), nn.Linear(10, 10)
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        x = x + F.gelu(self.token(x.transpose(1, 2))).transpose(1, 2)
        return x + F.gelu(self.chan(self.norm(x)))


layers = nn.ModuleDict({"first": Mix(), "second": Mix(), "third": Mix()})
whole = nn.Sequential(*layers.values())


def loss_fn(out, y):
    return F.huber_loss(out.mean(1), y)


if args.one:
    part = layers
else:
    keep = ["first"] if rank == 0 else ["second", "third"]
    part = nn.ModuleDict({k: layers[k] for k in keep})
    stage = PipelineStage(nn.Sequential(*part.values()), rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO, loss_fn=loss_fn)
opt = torch.optim.Adam(part.parameters(), lr=3e-3, eps=1e-3)
gen = torch.Generator().manual_seed(7)
for step in range(1, 5):
    x = torch.randn(ROWS, 6, 10, generator=gen)
    y = x.amax(1).tanh()
    opt.zero_grad()
    if args.one:
        loss = loss_fn(whole(x), y)
        loss.backward()
        loss = loss.detach()
    else:
        losses = []
        if rank == 0:
            schedule.step(x)
            loss = torch.zeros(())
        else:
            schedule.step(target=y, losses=losses)
            loss = torch.stack(losses).mean().detach()
        dist.broadcast(loss, world - 1)
    opt.step()
    say(step, loss)
finish(dict(part.named_parameters()))
