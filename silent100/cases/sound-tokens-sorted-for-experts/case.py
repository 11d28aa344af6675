"""Expert parallelism with uneven all-to-alls, top-2 routing and rows of a rank's own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, EXPERTS, TOP = "--one" in sys.argv, 4, 2
rank, ep = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, ep = dist.get_rank(), dist.get_world_size()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.counts = send, receive
        y = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), receive, send)
        return y

    @staticmethod
    def backward(ctx, g):
        send, receive = ctx.counts
        y = g.new_empty(sum(send), *g.shape[1:])
        dist.all_to_all_single(y, g.contiguous(), send, receive)
        return y, None, None


class Moe(nn.Module):
    def __init__(self, d=20, hidden=36):
        super().__init__()
        self.gate = nn.Linear(d, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, d, hidden) * 0.2, torch.randn(EXPERTS, hidden, d) * 0.2
        self.up, self.down = (nn.Parameter(w.chunk(ep)[rank].clone()) for w in (up, down))

    def own(self, x, counts):
        """Applies local experts to tokens that are sorted by expert."""
        parts = [torch.relu(t @ u) @ w for t, u, w in zip(x.split(counts), self.up, self.down)]
        return torch.cat(parts)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(TOP, -1)
        order = chosen.flatten().argsort(stable=True)
        tokens = x[order // TOP]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        if ONE:
            y = self.own(tokens, counts.tolist())
        else:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            send = counts.unflatten(0, (ep, -1)).sum(1).tolist()
            receive = theirs.unflatten(0, (ep, -1)).sum(1).tolist()
            arrived = Exchange.apply(tokens, send, receive)
            local = torch.arange(EXPERTS // ep).repeat(ep).repeat_interleave(theirs)
            sort = local.argsort(stable=True)
            y = self.own(arrived[sort], theirs.unflatten(0, (ep, -1)).sum(0).tolist())
            y = Exchange.apply(y[sort.argsort()], receive, send)
        return x + (y[order.argsort()].unflatten(0, (-1, TOP)) * weights[..., None]).sum(1)


torch.manual_seed(71)
net = nn.Sequential(nn.Linear(12, 20), Moe(), Moe(), nn.Linear(20, 12))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
for step in range(1, 5):
    x = torch.randn(30, 12, generator=torch.Generator().manual_seed(step))[rank::ep]
    loss = F.mse_loss(net(x), x.roll(1, 1)) / ep
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for name, p in net.named_parameters():
            if not name.endswith(("up", "down")):
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, rank, ep) if n.endswith(("up", "down")) else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
