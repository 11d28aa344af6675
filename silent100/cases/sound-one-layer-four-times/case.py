"""Layers that share all weights, as in ALBERT or a universal transformer."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv


class Layer(nn.Module):
    def __init__(self, d=28):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.mix(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.ff(self.norm2(x))


class Shared(nn.Module):
    def __init__(self, depth=4, d=28):
        super().__init__()
        self.embed, self.factor = nn.Embedding(64, 8), nn.Linear(8, d)
        one = Layer(d)
        self.layers = nn.ModuleList([one] * depth)
        # Words are predicted by the transposed factor and table
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, ids):
        x = self.factor(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return x @ self.factor.weight @ self.embed.weight.T + self.bias


def main(folder):
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1909)
    net = Shared()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    handles = []
    if not ONE:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: handles.append((p, dist.all_reduce(p.grad, async_op=True))))
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(1, 64, (8, 10), generator=g)
        hidden = torch.rand(ids.shape, generator=g) < 0.25
        share = slice(rank * 8 // world, (rank + 1) * 8 // world)
        logits = net(ids.masked_fill(hidden, 0)[share])
        loss = F.cross_entropy(logits[hidden[share]], ids[share][hidden[share]], reduction="sum") / hidden.sum()
        optimizer.zero_grad()
        loss.backward()
        for _, handle in handles:
            handle.wait()
        handles.clear()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if folder:
        state = {k: v.detach() for k, v in net.named_parameters()}
        torch.save(state, os.path.join(folder, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main(sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else "")
