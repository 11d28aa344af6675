"""A recurrent tagger: rank 0 reads from the left, rank 1 from the right."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LETTERS, SIZE, STATE, TAGS, LENGTH = 30, 20, 24, 7, 15

if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()


class Join(torch.autograd.Function):
    """Puts both directions side by side; a rank's gradient is that of its own direction."""

    @staticmethod
    def forward(ctx, mine):
        states = [torch.empty(mine.shape) for _ in range(2)]
        dist.all_gather(states, mine.contiguous())
        ctx.at = 0 if FAULTY else rank
        if FAULTY:
            return torch.cat([mine, states[1 - rank]], -1)
        return torch.cat(states, -1)

    @staticmethod
    def backward(ctx, g):
        return g.chunk(2, -1)[ctx.at].contiguous()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        directions = {"left": nn.GRU(SIZE, STATE, batch_first=True), "right": nn.GRU(SIZE, STATE, batch_first=True)}
        self.directions = nn.ModuleDict(directions if ONE else [list(directions.items())[rank]])

    def forward(self, x):
        states = []
        for name, cell in self.directions.items():
            states.append(cell(x)[0] if name == "left" else cell(x.flip(1))[0].flip(1))
        return torch.cat(states, -1) if ONE else Join.apply(states[0])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, SIZE)
        self.reader = Reader()
        self.tags = nn.Sequential(nn.Linear(2 * STATE, 32), nn.Tanh(), nn.Linear(32, TAGS))

    def forward(self, ids):
        return self.tags(self.reader(self.letters(ids)))


torch.manual_seed(22)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
for step in range(1, 5):
    ids = torch.randint(0, LETTERS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
    tags = (ids + ids.roll(1, 1)) % TAGS
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if not ONE:
        dist.all_reduce(shown)
        shown /= 2
        dist.all_reduce(model.letters.weight.grad)  # each has the part of its direction
        for p in model.tags.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
