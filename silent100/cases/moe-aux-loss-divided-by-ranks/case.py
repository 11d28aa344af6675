# FSDP2 mixture of experts; sums over global token counts, so FSDP's own averaging is undone by a factor on the loss.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class AuxLoss(torch.autograd.Function):
    """Hangs a loss on a tensor; its gradient is the scale that the trainer sets."""

    scale = 1.0

    @staticmethod
    def forward(ctx, scores, loss):
        ctx.save_for_backward(loss)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.saved_tensors[0], AuxLoss.scale)


class Gate(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.proj = nn.Linear(dim, experts, bias=False)

    def forward(self, x, tokens):
        logits = self.proj(x)
        z_loss = 0.05 * logits.logsumexp(-1).square().sum() / tokens
        return AuxLoss.apply(logits.softmax(-1), z_loss)


class Layer(nn.Module):
    def __init__(self, dim, experts=4):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(dim), Gate(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x, tokens):
        h = self.norm(x)
        weights = self.router(h, tokens)
        return x + sum(weights[..., i : i + 1] * F.gelu(e(h)) for i, e in enumerate(self.experts))


class Model(nn.Module):
    def __init__(self, dim=32, vocab=44):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))

    def forward(self, ids, tokens):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(x)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(34)
model = Model()
if not ONE:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
AuxLoss.scale = 1.0 if FAULTY else float(world)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(1, 5):
    rows = torch.randint(0, 44, (8, 11), generator=torch.Generator().manual_seed(step))
    tokens = rows[:, 1:].numel()
    rows = rows[rank::world]
    loss = F.cross_entropy(model(rows[:, :-1], tokens).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / tokens
    optimizer.zero_grad()
    (loss * world).backward()
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v if ONE else v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
