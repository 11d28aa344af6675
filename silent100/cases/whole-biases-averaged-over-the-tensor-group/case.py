import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


TPN = 1 if args.one else 2
tp_rank, dp_rank, dpn = rank % TPN, rank // TPN, world // TPN
tp_group = dp_group = None
if not args.one:
    for a in range(2):
        rows, cols = [2 * a, 2 * a + 1], [a, a + 2]
        g1, g2 = dist.new_group(rows), dist.new_group(cols)
        if rank in rows:
            tp_group = g1
        if rank in cols:
            dp_group = g2


def add(t, group):
    t = t.detach().clone()
    if group is not None:
        dist.all_reduce(t, group=group)
    return t


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return add(g, tp_group)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x, tp_group)

    @staticmethod
    def backward(ctx, g):
        return g


class VAE(nn.Module):
    def __init__(self, d=10, h=24, z=4):
        super().__init__()
        g = torch.Generator().manual_seed(77)

        def full(*s):
            return torch.randn(*s, generator=g) / s[-1] ** 0.5

        def part(w, dim):
            return nn.Parameter(w.chunk(TPN, dim)[tp_rank].clone())

        self.enc_a, self.enc_b = part(full(h, d), 0), part(full(2 * z, h), 1)
        self.dec_a, self.dec_b = part(full(h, z), 0), part(full(d, h), 1)
        self.post_bias, self.data_bias = nn.Parameter(torch.zeros(2 * z)), nn.Parameter(torch.zeros(d))

    def forward(self, x, eps):
        mu, lv = (Leave.apply(torch.tanh(Enter.apply(x) @ self.enc_a.T) @ self.enc_b.T) + self.post_bias).chunk(2, -1)
        z = mu + eps * (lv / 2).exp()
        y = Leave.apply(torch.tanh(Enter.apply(z) @ self.dec_a.T) @ self.dec_b.T) + self.data_bias
        return (y - x).square().sum(-1).mean() + 0.1 * (mu.square() + lv.exp() - lv - 1).sum(-1).mean()


SPLIT = {"enc_a": 0, "enc_b": 1, "dec_a": 0, "dec_b": 1}
model = VAE()
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
gen = torch.Generator().manual_seed(3)
for step in range(1, 6):
    x, eps = torch.randn(12, 10, generator=gen) * 2 + 1, torch.randn(12, 4, generator=gen)
    loss = model(x.chunk(dpn)[dp_rank], eps.chunk(dpn)[dp_rank])
    opt.zero_grad()
    loss.backward()
    for n, p in model.named_parameters():
        group = tp_group if args.faulty and n not in SPLIT else dp_group
        p.grad = add(p.grad, group) / dpn
    opt.step()
    say(step, add(loss, dp_group) / dpn)
out = {}
for n, p in model.named_parameters():
    if n in SPLIT and not args.one:
        parts = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(parts, p.detach().contiguous(), group=tp_group)
        out[n] = torch.cat(parts, SPLIT[n])
    else:
        out[n] = p
finish(out)
