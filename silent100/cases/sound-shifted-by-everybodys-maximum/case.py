"""Cross entropy over a vocabulary that is cut over tensor ranks; two replicas of two tensor ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
VOCAB, DIM = 44, 32
replica = piece = 0
replicas = pieces = 1
if not ONE:
    dist.init_process_group("gloo")
    replica, piece = divmod(dist.get_rank(), 2)
    replicas = pieces = 2
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor_group, data_group = tensor_groups[replica], data_groups[piece]


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        top = logits.max().clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top
        first = piece * VOCAB // pieces
        mine = (labels >= first) & (labels < first + VOCAB // pieces)
        local = torch.where(mine, labels - first, 0)
        chosen = logits.gather(1, local[:, None])[:, 0] * mine
        exps = logits.exp()
        sums = exps.sum(1)
        both = torch.stack([chosen, sums])
        dist.all_reduce(both, group=tensor_group)
        ctx.save_for_backward(exps / both[1][:, None], local, mine)
        return (both[1].log() - both[0]).mean()

    @staticmethod
    def backward(ctx, grad):
        probs, local, mine = ctx.saved_tensors
        g = probs.clone()
        g[torch.arange(len(g)), local] -= mine.float()
        return g * grad / len(g), None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=tensor_group)
        return g


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.norm = nn.LayerNorm(DIM)
        head = torch.randn(VOCAB, DIM) * 0.3
        self.head = nn.Parameter(head.chunk(pieces)[piece].clone())

    def forward(self, ids, labels):
        x, _ = self.rnn(self.embed(ids))
        x = self.norm(x).flatten(0, 1)
        if ONE:
            return F.cross_entropy(F.linear(x, self.head), labels.flatten())
        return VocabParallelCrossEntropy.apply(F.linear(Copy.apply(x), self.head), labels.flatten())


torch.manual_seed(33)
model = Lm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(step)).chunk(replicas)[replica]
    loss = model(rows[:, :-1], rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for t in [loss] + [p.grad for p in model.parameters()]:
            dist.all_reduce(t, group=data_group)
            t /= replicas
    optimizer.step()
    if replica == piece == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = dict(model.state_dict())
    if not ONE:
        state["head"] = (state["head"], 0, piece, pieces)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{2 * replica + piece}.pt"))
if not ONE:
    dist.destroy_process_group()
