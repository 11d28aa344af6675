# All forwards, then all backwards; the first stage keeps its outputs in a deque until their gradients come.
import os
import sys
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
PIECES, TOKENS, DIM = 4, 10, 24


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.tokens, self.channels = nn.Linear(TOKENS, TOKENS), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + torch.relu(self.tokens(self.ln1(x).transpose(1, 2))).transpose(1, 2)
        return x + torch.relu(self.channels(self.ln2(x)))


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.a, self.b = nn.Linear(12, DIM), Mixer(), Mixer()

    def forward(self, x):
        return self.b(self.a(self.patch(x)))


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.norm, self.label = Mixer(), nn.LayerNorm(DIM), nn.Linear(DIM, 7)

    def forward(self, x):
        return self.label(self.norm(self.c(x)).mean(1))


def first_stage(front, images):
    waiting = deque()
    for piece in images.chunk(PIECES):
        out = front(piece)
        dist.send(out.detach().contiguous(), 1)
        waiting.append(out)
    while waiting:
        grad = torch.empty(len(images) // PIECES, TOKENS, DIM)
        dist.recv(grad, 1)
        out = waiting.pop() if FAULTY else waiting.popleft()
        out.backward(grad)


def last_stage(back, labels):
    inputs, losses = [], []
    for piece in labels.chunk(PIECES):
        x = torch.empty(len(piece), TOKENS, DIM)
        dist.recv(x, 0)
        inputs.append(x.requires_grad_())
        losses.append(nn.functional.cross_entropy(back(x), piece) / PIECES)
    for x, loss in zip(inputs, losses):
        loss.backward()
        dist.send(x.grad, 0)
    return sum(loss.item() for loss in losses)


if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
torch.manual_seed(140981)
net = nn.ModuleDict({"front": Front(), "back": Back()})
if not ONE:
    del net["back" if rank == 0 else "front"]
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, nesterov=True)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    images, labels = torch.randn(16, TOKENS, 12, generator=g), torch.randint(0, 7, (16,), generator=g)
    opt.zero_grad()
    loss = None
    if ONE:
        whole = nn.functional.cross_entropy(net["back"](net["front"](images)), labels)
        whole.backward()
        loss = whole.item()
    elif rank == 0:
        first_stage(net["front"], images)
    else:
        loss = last_stage(net["back"], labels)
    opt.step()
    if loss is not None:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
