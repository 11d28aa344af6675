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
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
T, V, D, H = 24, 30, 16, 2
blocks = torch.arange(T).chunk(2 * world)
POS = [torch.cat([blocks[r], blocks[2 * world - 1 - r]]) for r in range(world)]


def rotate(*tensors):
    """Pass to the next rank, take from the previous one."""
    tensors = [t.contiguous() for t in tensors]
    outs = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t, (rank + 1) % world) for t in tensors]
    ops += [dist.P2POp(dist.irecv, o, (rank - 1) % world) for o in outs]
    for w in dist.batch_isend_irecv(ops):
        w.wait()
    return outs


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        m = torch.full(q.shape[:-1], float("-inf"))
        den, acc = torch.zeros(q.shape[:-1]), torch.zeros_like(q)
        kk, vv = k, v
        for hop in range(world):
            src = (rank - hop) % world
            keep = POS[rank][:, None] >= POS[src][None, :]
            s = (q @ kk.mT * scale).masked_fill(~keep, float("-inf"))
            new = torch.maximum(m, s.amax(-1))
            base = new.masked_fill(new.isinf(), 0.0)
            p = (s - base[..., None]).exp()
            fix = (m - base).exp()
            den, acc = den * fix + p.sum(-1), acc * fix[..., None] + p @ vv
            m = new
            if hop + 1 < world:
                kk, vv = rotate(kk, vv)
        out, lse = acc / den[..., None], m + den.log()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, g):
        q, kk, vv, out, lse = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        delta = (g * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(kk), torch.zeros_like(vv)
        for hop in range(world):
            src = (rank - hop) % world
            keep = POS[rank][:, None] >= POS[src][None, :]
            s = (q @ kk.mT * scale).masked_fill(~keep, float("-inf"))
            p = (s - lse[..., None]).exp()
            dv = dv + p.mT @ g
            ds = p * (g @ vv.mT - delta) * scale
            dq = dq + ds @ kk
            dk = dk + ds.mT @ q
            kk, vv, dk, dv = rotate(kk, vv, dk, dv)
        return dq, dk, dv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True) if args.one else Ring.apply(q, k, v)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


torch.manual_seed(4)
model = nn.ModuleDict(
    {"tok": nn.Embedding(V, D), "pos": nn.Embedding(T, D), "b0": Block(), "b1": Block(), "head": nn.Linear(D, V)}
)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(1, 6):
    ids = torch.randint(0, V, (3, T + 1), generator=torch.Generator().manual_seed(step))
    where = POS[rank]
    h = model["tok"](ids[:, where]) + model["pos"](where)
    h = model["head"](model["b1"](model["b0"](h)))
    loss = F.cross_entropy(h.flatten(0, 1), ids[:, where + 1].flatten(), reduction="sum") / (3 * T)
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
