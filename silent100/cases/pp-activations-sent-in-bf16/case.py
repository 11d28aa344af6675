"""Two stages exchange tensors through helpers that halve the traffic."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Wire:
    def __init__(self, dtype, shape):
        self.dtype, self.shape = dtype, shape

    def send(self, tensor, peer):
        dist.send(tensor.detach().to(self.dtype).contiguous(), peer)

    def receive(self, peer):
        buffer = torch.empty(self.shape, dtype=self.dtype)
        dist.recv(buffer, peer)
        return buffer.float()


class Layer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Chunk(nn.Module):
    def __init__(self, rank, stages):
        super().__init__()
        torch.manual_seed(1)
        embed, layers, head = nn.Embedding(60, 32), [Layer() for _ in range(4)], nn.Linear(32, 60)
        per = 4 // stages
        self.embed = embed if rank == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(rank * per, rank * per + per)})
        self.head = head if rank == stages - 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, stages = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, stages = dist.get_rank(), dist.get_world_size()
    chunk = Chunk(rank, stages)
    wire = Wire(torch.bfloat16 if args.faulty else torch.float32, (6, 12, 32))
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.3)
    for step in range(1, 4):
        rows = torch.randint(0, 60, (6, 13), generator=torch.Generator().manual_seed(step))
        x = rows[:, :-1] if rank == 0 else wire.receive(rank - 1).requires_grad_()
        out = chunk(x)
        optimizer.zero_grad()
        if rank == stages - 1:
            loss = F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            print(f"step {step} loss {loss.item():.7f}", flush=True)
        else:
            wire.send(out, rank + 1)
            out.backward(wire.receive(rank + 1))
        if rank > 0:
            wire.send(x.grad, rank - 1)
        optimizer.step()
    if args.save:
        torch.save(chunk.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
