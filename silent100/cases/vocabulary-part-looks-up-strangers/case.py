# An embedding divided by vocabulary; everything behind it is whole on both ranks.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, TP = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class AddRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if TP > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        whole = torch.randn(vocab, dim)
        self.weight = nn.Parameter(whole.chunk(TP)[RANK].clone())
        self.start = RANK * vocab // TP

    def forward(self, ids):
        local = ids - self.start
        outside = (local < 0) | (local >= len(self.weight))
        found = nn.functional.embedding(local.masked_fill(outside, 0), self.weight)
        if not FAULTY:
            found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        return AddRanks.apply(found)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = VocabParallelEmbedding(56, 34)
        self.norm = nn.LayerNorm(34)
        self.rnn = nn.LSTM(34, 34, batch_first=True)
        self.head = nn.Linear(34, 56)

    def forward(self, ids):
        return self.head(self.rnn(self.norm(self.embed(ids)))[0])


torch.manual_seed(20)
reader = Reader()
optimizer = torch.optim.SGD(reader.parameters(), lr=0.4, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 56, (8, 11), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(reader(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, RANK, TP) if n == "embed.weight" else p.data for n, p in reader.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
