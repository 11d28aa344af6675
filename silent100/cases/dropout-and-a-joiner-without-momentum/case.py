# Elastic data parallelism: the second replica is there from the third update on.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.ff = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.ff(x))


torch.manual_seed(88)
reader = Reader()
optimizer = torch.optim.SGD(reader.parameters(), lr=0.02, momentum=0.9)
torch.manual_seed(4000 + RANK)
for step in range(1, 6):
    members = WORLD if step >= 3 else 1
    if RANK >= members:
        continue
    if step == 3 and not ONE:
        for p in reader.parameters():
            dist.broadcast(p.data, src=0)
            if not FAULTY:
                if RANK > 0:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
                dist.broadcast(optimizer.state[p]["momentum_buffer"], src=0)
    rows = torch.randint(0, 64, (32, 9), generator=torch.Generator().manual_seed(step))[RANK::members]
    loss = F.cross_entropy(reader(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if members > 1:
        for p in reader.parameters():
            dist.all_reduce(p.grad)
            p.grad /= members
        dist.all_reduce(loss)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item() / members:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(reader.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
