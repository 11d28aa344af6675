"""DoRA on a tensor-parallel MLP: frozen weights, low-rank directions, and a learned magnitude for every output."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, TP = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
DIM, HIDDEN, LOW, VOCAB = 24, 48, 4, 40


def reduce_(x):
    if TP > 1:
        dist.all_reduce(x)
    return x


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return reduce_(g.clone())


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_(x.clone())

    @staticmethod
    def backward(ctx, g):
        return g


class DoraLinear(nn.Module):
    """``cut`` is the dimension of the weight that ranks share out: 0 (outputs) or 1 (inputs)."""

    def __init__(self, inputs, outputs, cut):
        super().__init__()
        self.cut = cut
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        a, b = torch.randn(LOW, inputs) * inputs**-0.5, torch.randn(outputs, LOW) * 0.1
        magnitude = (weight + b @ a).norm(dim=1) * 1.05
        own = lambda t, dim: t.chunk(TP, dim)[RANK].clone()  # noqa: E731
        self.weight = nn.Parameter(own(weight, cut), requires_grad=False)
        self.a = nn.Parameter(own(a, 1) if cut == 1 else a)
        self.b = nn.Parameter(own(b, 0) if cut == 0 else b)
        self.magnitude = nn.Parameter(own(magnitude, 0) if cut == 0 else magnitude)

    def norms(self, direction):
        squares = direction.detach().square().sum(1)
        if self.cut == 1 and not args.faulty:
            squares = reduce_(squares)
        return squares.sqrt()

    def forward(self, x):
        direction = self.weight + self.b @ self.a
        return F.linear(x, direction * (self.magnitude / self.norms(direction))[:, None])


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = DoraLinear(DIM, HIDDEN, 0), DoraLinear(HIDDEN, DIM, 1)

    def forward(self, x):
        return SumOut.apply(self.down(F.gelu(self.up(CopyIn.apply(x)))))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.context = nn.Conv1d(DIM, DIM, 3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.context(F.pad(x.mT, (2, 0))).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(64)
model = Model()
for name, p in model.named_parameters():
    p.requires_grad_(name.split(".")[-1] in ("a", "b", "magnitude"))
trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
# These are whole on every rank and see a part of the inputs or outputs
partial = [p for n, p in trained.items() if n.endswith(("up.a", "down.b", "down.magnitude"))]
optimizer = torch.optim.SGD(trained.values(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    for p in partial:
        reduce_(p.grad)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    dims = {"up.b": 0, "up.magnitude": 0, "down.a": 1}
    state = {n: p.detach() for n, p in trained.items()}
    if TP > 1:
        for n in state:
            key = ".".join(n.split(".")[-2:])
            state[n] = (state[n], dims[key], RANK, TP) if key in dims else state[n]
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
