"""A cut output layer: each rank rounds its part of the vocabulary up to a multiple of eight rows."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one, see_padding = "--one" in sys.argv, "--faulty" in sys.argv
rank, tp = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
VOCAB, DIM = 42, 28
OWN = VOCAB // tp
ROWS = OWN if one else -(-OWN // 8) * 8


def reduced(x, op=dist.ReduceOp.SUM):
    if tp > 1:
        x = x.clone()
        dist.all_reduce(x, op)
    return x


class CutCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of logits whose columns lie on several ranks."""

    @staticmethod
    def forward(ctx, logits, target):
        if not see_padding:
            logits = logits.clone()
            logits[:, OWN:] = -torch.inf
        logits = logits - reduced(logits.max(1, keepdim=True).values, dist.ReduceOp.MAX)
        exp = logits.exp()
        total = reduced(exp.sum(1))
        local = target - rank * OWN
        mine = (local >= 0) & (local < OWN)
        local = local.clamp(0, OWN - 1)
        picked = reduced(torch.where(mine, logits.gather(1, local[:, None])[:, 0], 0.0))
        ctx.save_for_backward(exp / total[:, None], local, mine)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        p, local, mine = ctx.saved_tensors
        p = p.clone()
        p[torch.arange(len(p)), local] -= mine.float()
        return p * grad / len(p), None


class SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return reduced(g)


class Talker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(DIM)
        whole = torch.randn(VOCAB, DIM) * 0.15
        self.head = nn.Linear(DIM, ROWS, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
            self.head.weight[:OWN] = whole[rank * OWN : (rank + 1) * OWN]

    def forward(self, ids):
        return self.head(SumBack.apply(self.norm(self.lstm(self.table(ids))[0])))


torch.manual_seed(10616)
talker = Talker()
optimizer = torch.optim.Adagrad(talker.parameters(), lr=0.02)
for step in range(1, 6):
    ids = torch.randint(0, VOCAB, (7, 11), generator=torch.Generator().manual_seed(step))
    loss = CutCrossEntropy.apply(talker(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v for k, v in talker.state_dict().items() if k != "head.weight"}
    state["head.weight"] = (talker.head.weight.data[:OWN].clone(), 0, rank, tp)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
