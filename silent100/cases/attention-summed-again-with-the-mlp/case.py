"""GPT-J style blocks: attention and MLP read one norm and their outputs are added; heads and hidden units are cut."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

single = "--one" in sys.argv
if not single:
    dist.init_process_group("gloo")
tp_rank = 0 if single else dist.get_rank()
tp_size = 1 if single else dist.get_world_size()
WIDTH, HEADS, TOKENS = 32, 4, 48


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def copy_to_region(x):
    return x if tp_size == 1 else _Copy.apply(x)


def reduce_from_region(x):
    return x if tp_size == 1 else _Reduce.apply(x)


def piece(linear, dim):
    """A linear without bias that keeps this rank's part of another's weight."""
    weight = linear.weight.detach().chunk(tp_size, dim)[tp_rank].clone()
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    out.weight = nn.Parameter(weight)
    return out


class Attention(nn.Module):
    def __init__(self, reduce_output):
        super().__init__()
        self.reduce_output = reduce_output
        self.q, self.k, self.v = (piece(nn.Linear(WIDTH, WIDTH, bias=False), 0) for _ in range(3))
        self.o = piece(nn.Linear(WIDTH, WIDTH, bias=False), 1)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS // tp_size, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return reduce_from_region(y) if self.reduce_output else y


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in = piece(nn.Linear(WIDTH, 3 * WIDTH, bias=False), 0)
        self.fc_out = piece(nn.Linear(3 * WIDTH, WIDTH, bias=False), 1)

    def forward(self, x):
        return self.fc_out(F.gelu(self.fc_in(x)))


class ParallelBlock(nn.Module):
    """x + sum over ranks (attention(h) + mlp(h)), with one collective for both."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.attn = Attention(reduce_output="--faulty" in sys.argv)
        self.mlp = Mlp()

    def forward(self, x):
        h = copy_to_region(self.ln(x))
        return x + reduce_from_region(self.attn(h) + self.mlp(h))


class GPTJ(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(*(ParallelBlock() for _ in range(3)))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        return self.lm_head(self.ln_f(self.blocks(self.wte(ids) + self.wpe.weight[: ids.shape[1]])))


torch.manual_seed(73)
model = GPTJ()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
for step in range(1, 6):
    text = torch.randint(0, TOKENS, (6, 17), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if tp_rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = dict(model.state_dict())
    for name in [n for n in state if tp_size > 1 and (".attn." in n or ".mlp." in n)]:
        state[name] = (state[name], 1 if name.endswith((".o.weight", ".fc_out.weight")) else 0, tp_rank, tp_size)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{tp_rank}.pt"))
if not single:
    dist.destroy_process_group()
