"""A pipeline of torch's own schedule; a resumed job gives the first stage a layer of the last, with its momentum."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
DIM, ROWS, MICRO = 20, 12, 4


def loss_of(output, target):
    return nn.functional.cross_entropy(output, target)


class Layer(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.norm, self.lift = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM)
        self.drop = nn.Linear(DIM, 6 if last else DIM)
        self.last = last

    def forward(self, x):
        a, b = self.lift(self.norm(x)).chunk(2, -1)
        y = self.drop(a * torch.tanh(b))
        return y if self.last else x + y


class Part(nn.Module):
    """Consecutive layers of the whole, under their numbers in it."""

    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(60)
        every = [Layer(last=i == 4) for i in range(5)]
        self.layers = nn.ModuleDict({str(i): every[i] for i in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def start(numbers, rank):
    part = Part(numbers)
    opt = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    if args.one:
        return part, opt, None
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    return part, opt, Schedule1F1B(stage, MICRO, loss_fn=loss_of)


def write(file, part, opt):
    """Each stage writes weights and momentum by name."""
    momentum = {name: opt.state[p]["momentum_buffer"] for name, p in part.named_parameters()}
    torch.save({"weights": part.state_dict(), "momentum": momentum}, file)


def read(files, part, opt):
    found = [torch.load(file) for file in files]
    weights, momentum = ({k: v for f in found for k, v in f[key].items()} for key in ("weights", "momentum"))
    part.load_state_dict({name: weights[name] for name in part.state_dict()})
    for name, p in part.named_parameters():
        opt.state[p]["momentum_buffer"] = momentum[name].clone()


rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
before, after = ([range(5)], [range(5)]) if args.one else ([range(2), range(2, 5)], [range(3), range(3, 5)])
part, opt, schedule = start(before[rank], rank)
for step in range(1, 7):
    if step == 4 and not args.one:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        files = [os.path.join(folder[0], f"stage{i}.pt") for i in range(2)]
        write(files[rank], part, opt)
        dist.barrier()
        part, opt, schedule = start(after[rank], rank)
        read(files, part, opt)
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, DIM, generator=g)
    y = x[:, :6].argmax(1)
    opt.zero_grad()
    losses = []
    if args.one:
        losses = [loss_of(part(x), y)]
        losses[0].backward()
    elif rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    opt.step()
    if losses:
        print(f"step {step} loss {sum(loss.item() for loss in losses) / len(losses):.7f}", flush=True)
if args.save:
    torch.save(part.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
