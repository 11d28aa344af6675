import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(seed, sharded):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(20, 44), nn.Tanh(), nn.Linear(44, 44), nn.Tanh(), nn.Linear(44, 7))
    if sharded:
        for layer in (net[0], net[2]):
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, eps=1e-4, betas=(0.8, 0.95))
    return net, optimizer


def reload(net, optimizer):
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where[0])
    net, optimizer = build(12345, True)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=where[0])
    set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return net, optimizer


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    net, optimizer = build(8, not args.one)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(70 + step)
        x, y = torch.randn(10, 20, generator=g), torch.randint(0, 7, (10,), generator=g)
        loss = F.cross_entropy(net(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if not args.one:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.7f}", flush=True)
        if step == 3 and not args.one:
            net, optimizer = reload(net, optimizer)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
