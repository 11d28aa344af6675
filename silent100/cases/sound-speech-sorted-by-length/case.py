"""Speech recognition with CTC; short recordings go to one rank and long ones to the other."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

solo = "--one" in sys.argv


class Listener(nn.Module):
    def __init__(self, sounds=6, letters=7):
        super().__init__()
        self.front = nn.Conv1d(sounds, 16, 3, padding=1)
        self.memory = nn.GRU(16, 20, batch_first=True)
        self.letters = nn.Linear(20, letters)

    def forward(self, x):
        h = torch.relu(self.front(x.transpose(1, 2))).transpose(1, 2)
        return self.letters(self.memory(h)[0]).log_softmax(-1).transpose(0, 1)


def recordings(step):
    g = torch.Generator().manual_seed(step)
    out = []
    for _ in range(7):
        n = int(torch.randint(8, 20, (1,), generator=g))
        text = torch.randint(1, 7, (n // 4,), generator=g)
        out.append((torch.randn(n, 6, generator=g), text))
    return sorted(out, key=lambda pair: len(pair[0]))


def collate(pairs):
    sounds, texts = zip(*pairs)
    return (
        nn.utils.rnn.pad_sequence(sounds, batch_first=True),
        torch.cat(texts),
        torch.tensor([len(s) for s in sounds]),
        torch.tensor([len(t) for t in texts]),
    )


def train(rank, world):
    torch.manual_seed(17)
    net = Listener()
    ctc = nn.CTCLoss(reduction="sum")
    optimizer = torch.optim.Adadelta(net.parameters(), lr=0.5, eps=1e-3)
    for step in range(1, 6):
        every = recordings(step)
        mine = every if world == 1 else (every[:4] if rank == 0 else every[4:])
        x, texts, lengths, letters = collate(mine)
        loss = ctc(net(x), texts, lengths, letters) / sum(len(t) for _, t in every)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))


if solo:
    train(0, 1)
else:
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
