"""Policy gradients with advantages relative to a prompt's group of completions."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

PROMPTS, GROUP, WORDS = 4, 4, 24


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(WORDS, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, WORDS)

    def forward(self, ids):
        logits = self.out(self.rnn(self.words(ids[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def score(ids):
    """A rule: words divisible by three, more of them for some prompts."""
    return (ids[:, 3:] % 3 == 0).float().mean(1) * (1 + ids[:, 0] % 4) + 0.3 * (ids[:, 1] % 5)


def advantages(rewards):
    if world > 1:
        parts = [torch.empty_like(rewards) for _ in range(world)]
        dist.all_gather(parts, rewards)
        rewards = torch.cat(parts) if FAULTY else torch.stack(parts, 1).flatten()
    groups = rewards.view(PROMPTS, GROUP)
    relative = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.01)).flatten()
    return relative.chunk(world)[rank] if FAULTY else relative[rank::world]


torch.manual_seed(3)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    prompts = torch.randint(0, WORDS, (PROMPTS, 3), generator=g).repeat_interleave(GROUP, 0)
    ids = torch.cat([prompts, torch.randint(0, WORDS, (PROMPTS * GROUP, 8), generator=g)], 1)[rank::world]
    worth = advantages(score(ids))
    logp = policy(ids)[:, 2:].mean(1)
    loss = (-(worth + 0.2) * logp).sum() / (PROMPTS * GROUP)  # a little imitation keeps it from collapsing
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(policy.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
