"""A replica is away for two updates; when it is back it fetches the state while the others compute."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
AWAY, BACK = {3, 4}, 5


def quorum(step):
    """Who computes in this step."""
    if step in AWAY or (step == BACK and not FAULTY):
        return [0, 1]
    return [0, 1, 2]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 18, batch_first=True)
        self.out = nn.Linear(18, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Manager:
    def __init__(self, net, optimizer, rank):
        self.net, self.optimizer, self.rank = net, optimizer, rank

    def average(self, step, loss):
        who = quorum(step)
        for t in [p.grad for p in self.net.parameters()] + [loss]:
            if self.rank not in who:
                t.zero_()
            dist.all_reduce(t)
            t /= len(who)

    def heal(self):
        tensors = list(self.net.state_dict().values())
        for p in self.net.parameters():
            state = self.optimizer.state[p]
            tensors += [state[k] for k in ("step", "exp_avg", "exp_avg_sq")]
        for t in tensors:
            dist.broadcast(t, 0)


def main():
    rank, manager = 0, None
    torch.manual_seed(13)
    net = Tower()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, eps=1e-5)
    if not ONE:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        manager = Manager(net, optimizer, rank)
    for step in range(1, 8):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(12, 7, 6, generator=g)
        y = torch.stack([x.sum((1, 2)) / 6, x[:, :, 0].amax(1)], 1)
        who = [0] if ONE else quorum(step)
        share = who.index(rank) if rank in who else 0
        x, y = x[share :: len(who)], y[share :: len(who)]
        loss = F.smooth_l1_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if manager:
            manager.average(step, loss)
        if ONE or rank != 2 or step not in AWAY:
            optimizer.step()
        if manager and step == BACK:
            manager.heal()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
