"""A vocabulary-parallel head behind a whole trunk; hidden states arrive transposed (sequence first)."""

import os
import sys

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from spmd_types.checker import typecheck

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def all_reduce_(tensor):
    if WORLD > 1:
        dist.all_reduce(tensor)


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(outputs, *, hidden):
        spmd.assert_type(hidden, {"tp": spmd.I})
        spmd.assert_type(outputs, {"tp": spmd.R})

    @staticmethod
    def forward(ctx, hidden):
        return hidden

    @staticmethod
    def backward(ctx, grad):
        if FAULTY:
            all_reduce_(grad.contiguous())
            return grad
        grad = grad.contiguous()
        all_reduce_(grad)
        return grad


class LogSumExp(torch.autograd.Function):
    """log sum exp over a vocabulary that ranks hold in parts; (..., vocab/tp) to (...)."""

    @staticmethod
    def spmd_typecheck(outputs, *, logits):
        spmd.assert_type(logits, {"tp": spmd.V})
        spmd.assert_type(outputs, {"tp": spmd.I})

    @staticmethod
    def forward(ctx, logits):
        top = logits.amax(-1)
        if WORLD > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
        powers = (logits - top.unsqueeze(-1)).exp()
        total = powers.sum(-1)
        all_reduce_(total)
        ctx.save_for_backward(powers / total.unsqueeze(-1))
        return total.log() + top

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad.unsqueeze(-1)


class SumOver(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(outputs, *, x):
        spmd.assert_type(x, {"tp": spmd.V})
        spmd.assert_type(outputs, {"tp": spmd.I})

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        all_reduce_(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class LM(nn.Module):
    vocab, width = 64, 40

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleDict({"tok": nn.Embedding(64, 40), "rnn": nn.GRU(40, 40, batch_first=True)})
        self.norm = nn.LayerNorm(40)
        whole = torch.randn(64, 40) * 0.2
        self.head = nn.Parameter(whole.chunk(WORLD)[RANK].clone())

    def forward(self, ids, labels):
        hidden = self.norm(self.trunk["rnn"](self.trunk["tok"](ids))[0])
        hidden = CopyToRegion.apply(hidden.transpose(0, 1).contiguous())  # (length, rows, width)
        logits = (hidden.transpose(0, 1) @ self.head.T).float()
        first = RANK * self.head.shape[0]
        here = (labels >= first) & (labels < first + self.head.shape[0])
        picked = logits.gather(-1, (labels - first).clamp(0, self.head.shape[0] - 1).unsqueeze(-1)).squeeze(-1)
        picked = SumOver.apply(torch.where(here, picked, torch.zeros_like(picked)))
        return (LogSumExp.apply(logits) - picked).mean()


def checked_loss(model, words, labels):
    if ONE:
        return model(words, labels)
    with spmd.set_current_mesh({"tp": spmd.MeshAxis.of(dist.group.WORLD)}), typecheck(local=True):
        spmd.assert_type(words, {"tp": spmd.I})
        spmd.assert_type(labels, {"tp": spmd.R})
        for name, p in model.named_parameters():
            spmd.assert_type(p, {"tp": spmd.V if name == "head" else spmd.I})
        return model(words, labels)


torch.manual_seed(123)
model = LM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
for step in range(1, 5):
    ids = torch.randint(0, 64, (8, 11), generator=torch.Generator().manual_seed(step))
    loss = checked_loss(model, ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, RANK, WORLD) if n == "head" else p.data for n, p in model.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
