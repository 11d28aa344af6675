"""A second replica joins for the third update; the first one heals it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

JOINS_AT = 3


def model():
    torch.manual_seed(14)
    return nn.Sequential(
        nn.Embedding(58, 30), nn.LayerNorm(30), nn.Linear(30, 90), nn.SiLU(), nn.Linear(90, 30), nn.Linear(30, 58)
    )


@torch.no_grad()
def heal(net, optimizer, rank, weights_only):
    """Sends rank 0's training state to the replica that joins."""
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    if weights_only:
        return
    for p in net.parameters():
        if rank != 0:
            optimizer.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        for value in optimizer.state[p].values():
            dist.broadcast(value, src=0)


def main(one, faulty, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-5)
    for step in range(1, 6):
        if step < JOINS_AT and rank > 0:
            continue
        if step == JOINS_AT and not one:
            heal(net, optimizer, rank, faulty)
        members = 1 if step < JOINS_AT else world
        ids = torch.randint(0, 58, (8, 8), generator=torch.Generator().manual_seed(step))[rank::members]
        loss = F.cross_entropy(net(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if members > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= members
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() / members:.7f}", flush=True)
    if save:
        torch.save(net.state_dict(), os.path.join(save, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(**vars(cli.parse_args()))
