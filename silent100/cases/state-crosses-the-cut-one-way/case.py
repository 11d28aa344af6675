"""A recurrent language model over long rows in two pieces; the state goes from the rank of the first to the second."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
VOCAB, SIZE, STATE, LENGTH, ROWS = 28, 16, 32, 20, 6


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.gru = nn.GRU(SIZE, STATE, num_layers=2, batch_first=True)
        self.predict = nn.Linear(STATE, VOCAB)

    def forward(self, ids, state):
        x, state = self.gru(self.embed(ids), state)
        return self.predict(x), state


def run(model, ids, labels):
    """Returns this piece's share of the loss, after backward through both pieces."""
    state = torch.zeros(2, ids.size(0), STATE)
    if RANK > 0:
        dist.recv(state, RANK - 1)
        state.requires_grad_(not args.faulty)
    logits, last = model(ids, state)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / WORLD
    if RANK < WORLD - 1:
        dist.send(last.detach(), RANK + 1)
    if RANK < WORLD - 1 and not args.faulty:
        gradient = torch.empty_like(last)
        dist.recv(gradient, RANK + 1)
        torch.autograd.backward([loss, last], [None, gradient])
    else:
        loss.backward()
    if state.grad is not None:
        dist.send(state.grad, RANK - 1)
    return loss.detach()


torch.manual_seed(27)
model = RecurrentLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    rows[:, 2:] = (rows[:, :-2] + rows[:, 2:] // 9) % VOCAB
    optimizer.zero_grad()
    shown = run(model, rows[:, :-1].chunk(WORLD, 1)[RANK], rows[:, 1:].chunk(WORLD, 1)[RANK])
    if WORLD > 1:
        dist.all_reduce(shown)
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
