import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        y = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True)
        return x + self.o(y)


class Net(nn.Module):
    def __init__(self, vocab=39, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(2)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class OwnedAdam:
    """Round-robin ownership; the owner updates in fp32 and sends the tensor to the others."""

    def __init__(self, model, rank, world, wire):
        self.all = list(model.parameters())
        self.rank, self.world, self.wire = rank, world, wire
        self.inner = torch.optim.Adam([p for i, p in enumerate(self.all) if i % world == rank], lr=2e-3, eps=1e-5)

    @torch.no_grad()
    def step(self):
        if self.world > 1:
            for i, p in enumerate(self.all):
                dist.reduce(p.grad, dst=i % self.world)
        self.inner.step()
        if self.world > 1:
            for i, p in enumerate(self.all):
                payload = p.to(self.wire) if p.dim() > 1 else p.clone()
                dist.broadcast(payload, src=i % self.world)
                if i % self.world != self.rank:
                    p.copy_(payload)
        for p in self.all:
            p.grad = None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--one", action="store_true")
    ap.add_argument("--faulty", action="store_true")
    ap.add_argument("--save")
    args = ap.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(88)
    net = Net()
    opt = OwnedAdam(net, rank, world, torch.bfloat16 if args.faulty else torch.float32)
    for step in range(1, 5):
        ids = torch.randint(39, (8, 11), generator=torch.Generator().manual_seed(step + 5))
        mine = ids[rank::world]
        loss = F.cross_entropy(net(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten()) / world
        loss.backward()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(
            {n: p.detach().clone() for n, p in net.named_parameters()}, os.path.join(args.save, f"rank{rank}.pt")
        )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
