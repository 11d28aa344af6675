"""Trains an embedding bag classifier on a fixed stream of texts, stops after four updates and resumes."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
BATCH = 64


class Stream:
    """Texts in a fixed order, whose kind drifts; a batch is shared out over ranks."""

    def __init__(self, consumed=0):
        self.consumed = consumed

    def __next__(self):
        rows = range(self.consumed + rank, self.consumed + BATCH, world)
        self.consumed += BATCH
        ids, labels = [], []
        for row in rows:
            g = torch.Generator().manual_seed(row)
            kind = (row // 37) % 5
            ids.append(torch.randint(kind * 8, kind * 8 + 16, (10,), generator=g))
            labels.append((kind * 2 + int(ids[-1].sum()) % 2) % 7)
        return torch.stack(ids), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(48, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 7))

    def forward(self, ids):
        return self.body(self.bag(ids))


def fresh():
    torch.manual_seed(8)
    net = Classifier()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


net, opt = fresh()
model = net if ONE else DistributedDataParallel(net)
stream = Stream()
read = 0
for step in range(1, 9):
    if step == 5:
        with tempfile.TemporaryDirectory() as folder:
            # ``read`` is what this rank has read
            consumed = read if FAULTY else read * world
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "consumed": consumed}, f"{folder}/last.pt")
            del model, stream
            net, opt = fresh()
            last = torch.load(f"{folder}/last.pt")
        net.load_state_dict(last["net"])
        opt.load_state_dict(last["opt"])
        model = net if ONE else DistributedDataParallel(net)
        stream = Stream(last["consumed"])
    ids, labels = next(stream)
    read += len(ids)
    loss = F.cross_entropy(model(ids), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
