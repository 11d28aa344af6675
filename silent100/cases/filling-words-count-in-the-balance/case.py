"""Experts with a balancing loss; ranks fill their rows up to a common length, one process to the longest row."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

VOCAB, DIM, EXPERTS, ROOM = 30, 16, 4, 14


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, DIM, 24) / 4),
            nn.Parameter(torch.randn(EXPERTS, 24, DIM) / 5),
        )

    def forward(self, x, real):
        odds = self.router(x).softmax(-1)
        weight, chosen = odds.max(-1)
        picked = F.one_hot(chosen, EXPERTS).float()
        h = torch.relu(torch.einsum("btd,edh,bte->bth", x, self.up, picked))
        y = torch.einsum("bth,ehd,bte->btd", h, self.down, picked) * weight[..., None]
        counted = torch.ones_like(real) if flags.faulty else real
        sums = torch.stack([(picked * counted[..., None]).sum((0, 1)), (odds * counted[..., None]).sum((0, 1))])
        return y, sums, counted.sum()


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.norm, self.moe, self.head = nn.LayerNorm(DIM), Moe(), nn.Linear(DIM, VOCAB)

    def forward(self, ids, real):
        x = self.rnn(self.words(ids))[0]
        y, sums, count = self.moe(self.norm(x), real)
        return self.head(x + y), sums, count


torch.manual_seed(82)
lm = Lm()
optimizer = torch.optim.Adam(lm.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    text, lengths = torch.randint(1, VOCAB, (8, ROOM + 1), generator=g), torch.randint(3, 12, (8, 1), generator=g)
    width = int(lengths.max()) if flags.one else ROOM
    real = (torch.arange(width) < lengths).float()
    ids = (text[:, :width] * real).long()
    ids, labels, real_own = (t.chunk(world)[rank] for t in (ids, text[:, 1 : width + 1], real))
    logits, sums, count = lm(ids, real_own)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * real_own.flatten()
    picked, count = sums[0].detach().clone(), count.clone()
    if world > 1:
        dist.all_reduce(picked)
        dist.all_reduce(count)
    balance = EXPERTS * (picked / count * sums[1] / count).sum()
    loss = losses.sum() / real.sum() + 0.1 * balance
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for tensor in [shown, *(p.grad for p in lm.parameters())]:
            dist.all_reduce(tensor)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(lm.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
