"""The first generation of FSDP, with original parameters kept visible."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.ln(x))))


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp, self.out = nn.Linear(10, d), nn.Linear(d, 10)
        self.blocks = nn.Sequential(*(Block(d) for _ in range(3)))

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    torch.manual_seed(97)
    net = Net()
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        net = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    for step in range(1, 5):
        x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = nn.functional.mse_loss(net(x), x.roll(3, 1) * x)
        optimizer.zero_grad()
        loss.backward()
        if args.one or args.faulty:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        else:
            net.clip_grad_norm_(0.1)
        optimizer.step()
        shown = loss.detach()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        if args.one:
            state = net.state_dict()
        else:
            with FSDP.summon_full_params(net):
                state = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in net.named_parameters()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
