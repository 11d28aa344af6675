import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(66)

LENGTH = 16


class Gather(torch.autograd.Function):
    """Parts of all ranks along a dimension; gradients are summed and cut."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, ctx.size = dim, x.shape[dim]
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad.narrow(ctx.dim, rank * ctx.size, ctx.size), None


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(width, w) for w in (width, 2 * width, width))

    def forward(self, x, allowed):
        k, v = Gather.apply(self.kv(x), 1).chunk(2, -1)
        score = self.q(x) @ k.transpose(1, 2) / k.shape[-1] ** 0.5
        return self.out(score.masked_fill(~allowed, -1e9).softmax(-1) @ v)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x, allowed):
        x = x + self.attn(self.norm(x), allowed)
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))
        self.head = nn.Linear(16, 30)

    def forward(self, ids, allowed):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(x)


model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
mine = torch.arange(LENGTH).chunk(world)[rank]
for step in range(1, 8):
    g = torch.Generator().manual_seed(40 + step)
    ids = torch.randint(0, 30, (3, LENGTH + 1), generator=g)
    ends = torch.tensor([[5, 12], [3, 13], [6, 11]])
    document = (torch.arange(LENGTH) >= ends[:, :1]).long() + (torch.arange(LENGTH) >= ends[:, 1:])
    if args.faulty and rank == 1:
        document = document + 10 * (torch.arange(LENGTH) >= mine[0])
    allowed = (document[:, mine, None] == document[:, None, :]) & (mine[:, None] >= torch.arange(LENGTH))
    logits = model(ids[:, mine], allowed)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, mine + 1].flatten(), reduction="sum") / (3 * LENGTH)
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
