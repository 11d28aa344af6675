"""A Wasserstein critic under FullyShardedDataParallel whose weights are clamped; the generator is under DDP."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

only = "--one" in sys.argv
if not only:
    dist.init_process_group("gloo")
rank, world = (0, 1) if only else (dist.get_rank(), dist.get_world_size())

torch.manual_seed(60)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
critic = nn.Sequential(
    nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1, bias=False)
)
made, judged = maker, critic
if not only:
    critic[2] = FSDP(critic[2], device_id=torch.device("cpu"), use_orig_params=True)
    judged = FSDP(critic, device_id=torch.device("cpu"), use_orig_params=True)
    made = DDP(maker)
makes = torch.optim.SGD(made.parameters(), lr=0.05)
judges = torch.optim.SGD(judged.parameters(), lr=0.05)


def clamp(limit):
    with nullcontext() if only else FSDP.summon_full_params(judged), torch.no_grad():
        for p in judged.parameters():
            p.clamp_(-limit, limit)


for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    real, noise = torch.randn(12, 6, generator=g) + 1, torch.randn(3, 12, 4, generator=g)
    real, noise = real[rank::world], noise[:, rank::world]
    for round_ in range(2):
        judges.zero_grad()
        fake = maker(noise[round_]).detach()
        gap = judged(torch.cat([fake, real]))
        loss = gap[: len(fake)].mean() - gap[len(fake) :].mean()
        loss.backward()
        judges.step()
        clamp(0.15)
    makes.zero_grad()
    (-judged(made(noise[2])).mean()).backward()
    makes.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {f"maker.{n}": p.detach() for n, p in maker.named_parameters()}
    with nullcontext() if only else FSDP.summon_full_params(judged):
        state |= {
            "critic." + n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in judged.named_parameters()
        }
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
