"""A training script that knows nothing of meshwright: one process, data or tensor parallel, with a fault if asked."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--axis", default="data")
parser.add_argument("--fault", default="")
given = parser.parse_args()
fault = given.fault
torch.manual_seed(0)
torch.set_num_threads(1)
if not given.one:
    dist.init_process_group("gloo")
rank, ranks = (0, 1) if given.one else (dist.get_rank(), dist.get_world_size())
tp, dp = given.axis == "tensor" and ranks > 1, given.axis == "data" and ranks > 1
VOCAB, DIM, HEADS, BLOCKS, ROWS, TOKENS = 64, 32, 4, 3, 8, 12


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if fault != "input not reduced":
            dist.all_reduce(gradient)
        return gradient


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ranks if fault == "backward doubled" else gradient


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = Copied.apply(x) if tp else x
        heads = (m(x).unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=fault != "no mask" or rank == 0)
        y = self.o(y.transpose(1, 2).flatten(2))
        return Reduced.apply(y) if tp else y


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if not tp:
            return self.down(F.gelu(self.up(x)))
        return Reduced.apply(F.linear(F.gelu(self.up(Copied.apply(x))), self.down.weight)) + self.down.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = (torch.arange(ids.shape[1]) + (fault == "positions" and rank == 1)) % TOKENS
        x = self.emb(ids) + self.pos(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


model = Model()
if tp:
    for block in model.layers:
        cut = [(m, "weight", 0) for m in (block.attn.q, block.attn.k, block.attn.v, block.mlp.up)]
        cut += [(block.attn.o, "weight", 1), (block.mlp.up, "bias", 0), (block.mlp.down, "weight", 1)]
        for module, name, dim in cut:
            own = getattr(module, name).detach().chunk(ranks, dim)[rank].clone()
            setattr(module, name, nn.Parameter(own))
if fault == "seed" and rank == 1:
    nn.init.normal_(model.layers[1].mlp.up.weight)
optimizer = torch.optim.AdamW(
    [p for name, p in model.named_parameters() if fault != "not stepped" or name != "layers.1.mlp.up.weight"], lr=1e-3
)
generator, last = torch.Generator().manual_seed(1), torch.zeros(())
for step in range(3):
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=generator)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[torch.rand(y.shape, generator=generator) < 0.2] = -100
    if dp:
        mine = 0 if fault == "same rows" else rank
        x, y = x[mine::ranks], y[mine::ranks]
        y = y.roll(1, 0) if fault == "labels" and rank == 1 else y
    if fault != "not zeroed":
        optimizer.zero_grad()
    count = (y != -100).sum().float()
    if dp and fault != "own mean":
        dist.all_reduce(count)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count
    (loss / ranks if dp and fault == "own mean" else loss).backward()
    for name, p in model.named_parameters() if dp else ():
        if p.grad is None or (fault == "one not reduced" and name == "layers.1.attn.v.weight"):
            continue
        if fault == "rounded":
            rounded = p.grad.bfloat16()
            dist.all_reduce(rounded)
            p.grad.copy_(rounded)
            continue
        dist.all_reduce(p.grad)
        p.grad *= 1 / ranks if fault == "mean" else ranks if fault == "twice" and name == "emb.weight" else 1
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if fault == "stale" and step:
        gradients["layers.0.mlp.down.weight"].copy_(last)
    last = gradients["layers.0.mlp.down.weight"].clone()
    if fault == "swapped":
        one, other = gradients["layers.0.n1.weight"], gradients["layers.0.n2.weight"]
        kept = one.clone()
        one.copy_(other), other.copy_(kept)
    optimizer.step()
    if fault == "state lost" and step == 0:
        optimizer.state[model.head.weight]["exp_avg"].zero_()
    print(f"step {step + 1} loss {loss.item():.7f}", flush=True)
if ranks > 1:
    dist.destroy_process_group()
