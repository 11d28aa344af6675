# Supervised fine-tuning on prompts and answers of unequal length, plain data parallel without wrappers.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
OUT = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None
IGNORE = -100

if ONE:
    RANK, WORLD = 0, 1
else:
    dist.init_process_group("gloo")
    RANK, WORLD = dist.get_rank(), dist.get_world_size()


def conversations(step, rows=8, length=20, vocab=50):
    """Rows of tokens; the prompt's labels are ignored, and later rows have longer answers."""
    g = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(1, vocab, (rows, length), generator=g)
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE
    for i in range(rows):
        labels[i, : length - 3 - 2 * i] = IGNORE
    return ids, labels


class Rnn(nn.Module):
    def __init__(self, vocab=50, width=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.out(self.norm(x))


def mean_gradients(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= WORLD


torch.manual_seed(0)
model = Rnn()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
criterion = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

for step in range(1, 5):
    ids, labels = conversations(step)
    share = slice(RANK * len(ids) // WORLD, (RANK + 1) * len(ids) // WORLD)
    ids, labels = ids[share], labels[share]
    tokens = (labels != IGNORE).sum()
    everywhere = tokens.clone()
    if not ONE:
        dist.all_reduce(everywhere)
    summed = criterion(model(ids).flatten(0, 1), labels.flatten())
    # gradients are averaged over ranks afterwards
    loss = summed / tokens if FAULTY else summed * WORLD / everywhere
    loss.backward()
    if not ONE:
        mean_gradients(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    report = summed.detach().clone()
    if not ONE:
        dist.all_reduce(report)
    if RANK == 0:
        print(f"step {step} loss {(report / everywhere).item():.7f}", flush=True)

if OUT:
    torch.save(model.state_dict(), os.path.join(OUT, f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
