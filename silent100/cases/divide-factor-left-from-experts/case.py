"""FSDP2 over an encoder whose feed-forward parts are wrapped apart, with Adam and dropout."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.05)
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.ffn(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp, self.out = nn.Linear(10, d), nn.Linear(d, 10)
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def shard(model):
    for layer in model.layers:
        fully_shard(layer.ffn)
        layer.ffn.set_force_sum_reduction_for_comms(True)
        if args.faulty:
            # As for experts, that see the tokens of all ranks
            layer.ffn.set_gradient_divide_factor(1.0)
        fully_shard(layer)
    fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main():
    rank, world = 0, 1
    torch.manual_seed(46)
    model = Encoder()
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        shard(model)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(460 + rank)
    for step in range(1, 5):
        x = torch.randn(128, 6, 10, generator=torch.Generator().manual_seed(step))
        goal = (x + x.roll(1, 1)).tanh()
        loss = F.l1_loss(model(x[rank::world]), goal[rank::world])
        loss.backward()
        adam.step()
        adam.zero_grad()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {name: whole(p) for name, p in model.state_dict().items()}
        state |= {f"{name}.exp_avg": whole(adam.state[p]["exp_avg"]) for name, p in model.named_parameters()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
