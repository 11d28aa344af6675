"""A recurrent model over long rows; each rank reads its stretch of time and hands its state on."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, HIDE, LENGTH = 24, 20, 16


class Inbox:
    """Receives states; two buffers, so that one can be filled while the other is read."""

    def __init__(self):
        self.filled = None

    def take(self, rows):
        state = torch.empty(1, rows, HIDE)
        dist.recv(state, rank - 1)
        ready = state if self.filled is None or not FAULTY else self.filled
        self.filled = state
        return ready.clone()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(VOCAB, HIDE), nn.GRU(HIDE, HIDE, batch_first=True)
        self.head = nn.Linear(HIDE, VOCAB)

    def forward(self, ids, state):
        out, state = self.rnn(self.words(ids), state)
        return self.head(out), state


torch.manual_seed(19)
reader, inbox = Reader(), Inbox()
optimizer = torch.optim.SGD(reader.parameters(), lr=1.0, momentum=0.8)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids, labels = (t.chunk(world, 1)[rank] for t in (rows[:, :-1], rows[:, 1:]))
    before = torch.zeros(1, 6, HIDE) if rank == 0 else inbox.take(6)
    before.requires_grad_()
    logits, after = reader(ids, before)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / world
    optimizer.zero_grad()
    if rank < world - 1:
        dist.send(after.detach(), rank + 1)
        grad = torch.empty_like(after)
        dist.recv(grad, rank + 1)
        torch.autograd.backward([loss, after], [None, grad])
    else:
        loss.backward()
    if rank > 0:
        dist.send(before.grad, rank - 1)
    shown = loss.detach()
    if world > 1:
        for p in reader.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(reader.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
