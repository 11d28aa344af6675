"""A tensor-parallel language model whose queries and keys are normalized over all heads together."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ALONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
DIM, HEADS, VOCAB = 32, 4, 53
RANK, SIZE = 0, 1
if not ALONE:
    dist.init_process_group("gloo")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()


class Enter(torch.autograd.Function):
    """Nothing on the way in, a sum over ranks on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    """A sum over ranks on the way out, nothing on the way back."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def enter(x):
    return x if SIZE == 1 else Enter.apply(x)


def leave(x):
    return x if SIZE == 1 else Leave.apply(x)


class CutNorm(nn.Module):
    """RMS norm over all features, of which a rank holds its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM // SIZE))

    def forward(self, x):
        if FAULTY:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)
        squares = enter(leave(x.pow(2).sum(-1, keepdim=True)))
        return x * torch.rsqrt(squares / DIM + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, whole):
        super().__init__()
        with torch.random.fork_rng():
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM // SIZE, bias=False) for _ in range(3))
            self.o_proj = nn.Linear(DIM // SIZE, DIM, bias=False)
        for layer, matrix in zip((self.q_proj, self.k_proj, self.v_proj), whole):
            layer.weight.data.copy_(matrix.chunk(SIZE)[RANK])
        self.o_proj.weight.data.copy_(whole[3].chunk(SIZE, 1)[RANK])
        self.q_norm, self.k_norm = CutNorm(), CutNorm()

    def forward(self, x):
        x = enter(x)
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (HEADS // SIZE, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return leave(self.o_proj(y.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention([torch.randn(DIM, DIM) * 0.25 for _ in range(4)])
        self.post_norm = nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.post_norm(self.attn(x))
        return x + self.mlp(x)


class Olmo(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(1424)
model = Olmo()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(0, VOCAB, (6, 12), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "q_norm": 0, "k_norm": 0}
    state = {}
    for name, p in model.named_parameters():
        dim = next((d for part, d in cut.items() if part in name), None)
        state[name] = p.data if dim is None else (p.data, dim, RANK, SIZE)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ALONE:
    dist.destroy_process_group()
