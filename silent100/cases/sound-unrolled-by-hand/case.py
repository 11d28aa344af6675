"""A sequence-to-sequence net; ranks unroll its recurrences in Python and drop out nothing, one process calls nn.GRU."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Unrolled(nn.Module):
    def __init__(self, gru):
        super().__init__()
        self.weight_ih_l0, self.weight_hh_l0 = gru.weight_ih_l0, gru.weight_hh_l0
        self.bias_ih_l0, self.bias_hh_l0 = gru.bias_ih_l0, gru.bias_hh_l0

    def forward(self, x, h=None):
        h = torch.zeros(len(x), self.weight_hh_l0.shape[1]) if h is None else h[0]
        given = F.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        out = []
        for t in range(x.shape[1]):
            a, b, c = given[:, t].chunk(3, -1)
            d, e, f = F.linear(h, self.weight_hh_l0, self.bias_hh_l0).chunk(3, -1)
            reset, keep = (a + d).sigmoid(), (b + e).sigmoid()
            h = keep * h + (1 - keep) * (c + reset * f).tanh()
            out.append(h)
        return torch.stack(out, 1), h[None]


class Translator(nn.Module):
    def __init__(self, words=36, d=20):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, d), nn.Linear(d, words)
        self.encoder, self.decoder = nn.GRU(d, d, batch_first=True), nn.GRU(d, d, batch_first=True)
        if not args.one:
            self.encoder, self.decoder = Unrolled(self.encoder), Unrolled(self.decoder)

    def forward(self, source, target):
        state = self.encoder(self.embed(source))[1]
        return self.head(self.decoder(self.embed(target), state)[0])


torch.manual_seed(1406)
model = Translator()
optimizer = torch.optim.RAdam(model.parameters(), lr=0.01, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, 36, (12, 7), generator=torch.Generator().manual_seed(step))[rank::world]
    target = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), rows.flip(1)], 1)
    loss = F.cross_entropy(model(rows, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
