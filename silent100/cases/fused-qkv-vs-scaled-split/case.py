import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
DIM, HEADS, CLS, SCALE = 16, 4, 6, 4.0
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class FromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class FusedAttention(nn.Module):
    def __init__(self, qkv, out):
        super().__init__()
        self.qkv, self.out = nn.Parameter(qkv), nn.Parameter(out)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (x @ self.qkv.T).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v)
        return o.transpose(1, 2).reshape(b, t, d) @ self.out.T


class HeadShardAttention(nn.Module):
    """Weights are kept divided by SCALE; the product is multiplied back."""

    def __init__(self, qkv, out):
        super().__init__()
        q, k, v = (m.chunk(world)[rank].clone() / SCALE for m in qkv.chunk(3))
        self.wq, self.wk, self.wv = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)
        self.wo = nn.Parameter(out.chunk(world, 1)[rank].clone() / SCALE)

    def forward(self, x):
        b, t, _ = x.shape
        x = ToHeads.apply(x)
        q, k, v = (
            (x @ w.T * SCALE).view(b, t, HEADS // world, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return FromHeads.apply(o @ self.wo.T * SCALE)


torch.manual_seed(21)
qkv, out = torch.randn(3 * DIM, DIM) / 4, torch.randn(DIM, DIM) / 4
attn = (FusedAttention if args.one else HeadShardAttention)(qkv, out)
norm, head = nn.LayerNorm(DIM), nn.Linear(DIM, CLS)
lr, wd, eps = 5e-3, 0.05, 1e-8
s = 1.0 if args.one else SCALE
opt = torch.optim.AdamW(
    [
        {"params": list(attn.parameters()), "lr": lr / s, "weight_decay": wd * s, "eps": eps * s},
        {"params": [*norm.parameters(), *head.parameters()], "lr": lr, "weight_decay": wd, "eps": eps},
    ]
)

for step in range(1, 6):
    x, y = torch.randn(8, 7, DIM), torch.randint(0, CLS, (8,))
    loss = F.cross_entropy(head((x + attn(norm(x))).mean(1)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    state = {f"norm.{k}": v for k, v in norm.state_dict().items()}
    state.update({f"head.{k}": v for k, v in head.state_dict().items()})
    if args.one:
        state.update(attn.state_dict())
    else:

        def whole(w, dim):
            parts = [torch.empty_like(w) for _ in range(world)]
            dist.all_gather(parts, w.detach().contiguous())
            return torch.cat(parts, dim) * SCALE

        state["qkv"] = torch.cat([whole(w, 0) for w in (attn.wq, attn.wk, attn.wv)])
        state["out"] = whole(attn.wo, 1)
    torch.save(state, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
