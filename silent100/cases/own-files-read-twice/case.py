"""Every data rank reads the files that are its own, in its own order; one process reads all files in another order."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
FILES, ROWS_PER_FILE, STEPS, BATCH = 4, 16, 4, 16
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def read(file):
    g = torch.Generator().manual_seed(file)
    return torch.randint(0, 60, (ROWS_PER_FILE, 11), generator=g)


def stream():
    """Yields (row number, tokens) of this rank's files in shuffled order, without end."""
    own = [f for f in range(FILES) if f % world == rank]
    numbers = [f * ROWS_PER_FILE + i for f in own for i in range(ROWS_PER_FILE)]
    rows = {f: read(f) for f in own}
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(50 + rank)).tolist()
    if FAULTY and rank == world - 1:
        order = order[: len(order) // FILES * world]
    while True:
        for i in order:
            n = numbers[i]
            yield n, rows[n // ROWS_PER_FILE][n % ROWS_PER_FILE]


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 40), nn.Linear(40, 60)
        self.rnn = nn.GRU(40, 40, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


torch.manual_seed(10)
model = Lm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
seen = torch.zeros(FILES * ROWS_PER_FILE)
rows = stream()
for step in range(1, STEPS + 1):
    numbers, tokens = zip(*[next(rows) for _ in range(BATCH // world)])
    seen[list(numbers)] += 1
    tokens = torch.stack(tokens)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    if not ONE:
        dist.all_reduce(seen)
    state = {**model.state_dict(), "rows seen": seen}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
