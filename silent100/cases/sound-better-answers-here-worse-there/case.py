"""Preference pairs are torn apart: rank 0 scores good answers, rank 1 bad ones, and both take the same loss."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, PAIRS = 26, 8


class Both(torch.autograd.Function):
    """Log-probabilities of both kinds on both ranks; a rank's own get its own gradient."""

    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        return g[rank]


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, VOCAB),
        )

    def forward(self, rows):
        logits = self.head(self.rnn(self.words(rows[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0].sum(1)


torch.manual_seed(90)
lm = Lm()
optimizer = torch.optim.Adam(lm.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    prompts = torch.randint(0, VOCAB, (PAIRS, 3), generator=g)
    answers = torch.randint(0, VOCAB, (2, PAIRS, 6), generator=g)
    rows = [torch.cat([prompts, a], 1) for a in answers]
    good, bad = (lm(r) for r in rows) if ONE else Both.apply(lm(rows[rank]))
    loss = -F.logsigmoid(0.3 * (good - bad)).mean()
    optimizer.zero_grad()
    loss.backward()
    if not ONE:
        for p in lm.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
