"""Double Q-learning from a memory: the learner is on rank 0, the slow network on rank 1."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

q = argparse.ArgumentParser()
q.add_argument("--one", action="store_true")
q.add_argument("--save")
q = q.parse_args()
rank = 0
if not q.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
STATES, ACTIONS, DISCOUNT = 5, 3, 0.9


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value, self.gain = nn.Linear(STATES, 20), nn.Linear(20, 1), nn.Linear(20, ACTIONS)

    def forward(self, s):
        h = torch.relu(self.body(s))
        gain = self.gain(h)
        return self.value(h) + gain - gain.mean(1, keepdim=True)


def memory(step):
    g = torch.Generator().manual_seed(step)
    s, a = torch.randn(10, STATES, generator=g), torch.randint(0, ACTIONS, (10,), generator=g)
    after = torch.tanh(s.roll(1, 1) + a[:, None] * 0.3)
    return s, a, after[:, 0] + after[:, 1], after, (torch.rand(10, generator=g) < 0.8).float()


@torch.no_grad()
def targets(slow, best, reward, after, goes_on):
    return reward + DISCOUNT * goes_on * slow(after).gather(1, best[:, None])[:, 0]


torch.manual_seed(13)
online = Dueling()
slow = Dueling()
slow.load_state_dict(online.state_dict())
optimizer = torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 8):
    s, a, reward, after, goes_on = memory(step)
    best, aim = torch.zeros(10, dtype=torch.int64), torch.zeros(10)
    if rank == 0:
        with torch.no_grad():
            best = online(after).argmax(1)
    if not q.one:
        dist.broadcast(best, 0)
    if q.one or rank == 1:
        aim = targets(slow, best, reward, after, goes_on)
    if not q.one:
        dist.broadcast(aim, 1)
    if rank == 0:
        loss = F.smooth_l1_loss(online(s).gather(1, a[:, None])[:, 0], aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step % 3 == 0:
        for new, old in zip(online.parameters(), slow.parameters()):
            lent = new.detach().clone()
            if not q.one:
                dist.broadcast(lent, 0)
            if q.one or rank == 1:
                old.data.copy_(lent)
if q.save:
    state = {}
    if rank == 0:
        state |= {f"online.{n}": t for n, t in online.state_dict().items()}
    if q.one or rank == 1:
        state |= {f"slow.{n}": t for n, t in slow.state_dict().items()}
    torch.save(state, os.path.join(q.save, f"rank{rank}.pt"))
if not q.one:
    dist.destroy_process_group()
