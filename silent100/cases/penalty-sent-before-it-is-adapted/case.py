"""Policy gradients on short texts with a KL penalty to a frozen reference; rank 0 adapts the penalty's weight."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
VOCAB, DIM, ROWS, LENGTH = 30, 24, 12, 9


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.wte(ids))
        return self.lm_head(h + self.mlp(h)).log_softmax(-1)


class KlController:
    """The adaptive controller of Ziegler et al.: proportional, with a clipped error."""

    def __init__(self, value, target, rate, rank, world):
        self.value, self.target, self.rate = value, target, rate
        self.rank, self.world = rank, world

    def adapted(self, kl):
        error = min(max(kl / self.target - 1, -0.4), 0.4)
        return self.value * (1 + self.rate * error)

    def update(self, kl):
        if self.world == 1:
            self.value = self.adapted(kl)
            return
        late = "--faulty" in sys.argv
        if self.rank == 0 and not late:
            self.value = self.adapted(kl)
        shared = torch.tensor(self.value, dtype=torch.float64)
        dist.broadcast(shared, 0)
        self.value = shared.item()
        if self.rank == 0 and late:
            self.value = self.adapted(kl)


def rollouts(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g)
    rewards = (ids[:, 1:] % 3 == 0).float().mean(1)
    return ids, 2 * rewards


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    controller = KlController(0.5, 0.05, 0.9, rank, world)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for step in range(1, 6):
        ids, advantages = rollouts(step)
        ids, advantages = ids[rank::world], advantages[rank::world]
        logps, ref = policy(ids[:, :-1]), reference(ids[:, :-1])
        chosen = logps.gather(-1, ids[:, 1:, None])[..., 0]
        kl = (logps.exp() * (logps - ref)).sum(-1).mean()
        loss = (controller.value * kl - (advantages[:, None] * chosen).mean()) / world
        optimizer.zero_grad()
        loss.backward()
        numbers = torch.stack([loss.detach(), kl.detach() / world])
        if world > 1:
            dist.all_reduce(numbers)
            for p in policy.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        controller.update(numbers[1].item())
        if rank == 0:
            print(f"step {step} loss {numbers[0].item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(policy.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
