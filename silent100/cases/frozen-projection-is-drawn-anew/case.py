"""Random-projection targets (BEST-RQ).

Masked frames are to be told by the code nearest to a fixed projection of them.
"""

import io
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Targets(nn.Module):
    def __init__(self):
        super().__init__()
        keep = not FAULTY
        self.register_buffer("projection", torch.randn(10, 6), persistent=keep)
        self.register_buffer("codebook", F.normalize(torch.randn(14, 6), dim=1), persistent=keep)

    @torch.no_grad()
    def forward(self, x):
        return (F.normalize(x @ self.projection, dim=-1) @ self.codebook.T).argmax(-1)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(10, 24, batch_first=True, bidirectional=True)
        self.head, self.quantizer = nn.Linear(48, 14), Targets()

    def forward(self, x, hidden):
        logits = self.head(self.encoder(x.masked_fill(hidden[..., None], 0.0))[0])
        return F.cross_entropy(logits[hidden], self.quantizer(x)[hidden])


def build():
    speech = Speech()
    optimizer = torch.optim.Adam(speech.parameters(), lr=5e-3, eps=1e-4)
    return speech, optimizer, speech if ONE else DistributedDataParallel(speech)


torch.manual_seed(35)
speech, optimizer, net = build()
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, 10, generator=g).cumsum(1)[rank::world]
    hidden = torch.zeros(len(x), 12, dtype=torch.bool)
    hidden[:, 2 + step % 3 : 6 + step % 3] = True
    loss = net(x, hidden)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
    if step == 3:
        file = io.BytesIO()
        torch.save([speech.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        weights, moments = torch.load(file)
        speech, optimizer, net = build()
        speech.load_state_dict(weights)
        optimizer.load_state_dict(moments)
if "--save" in sys.argv:
    torch.save(
        {n: p.detach() for n, p in speech.named_parameters()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
