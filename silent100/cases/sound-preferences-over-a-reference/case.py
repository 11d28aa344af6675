import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Policy(nn.Module):
    def __init__(self, vocab=44, d=26):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.rnns = nn.ModuleList(nn.RNN(d, d, batch_first=True) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for rnn in self.rnns:
            x = x + rnn(x)[0]
        return self.head(x)


def score(model, ids, answer):
    """Sums log-probabilities of an answer's words for each row."""
    logs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logs * answer[:, 1:]).sum(-1)


def pairs(step, rows=8, length=12):
    g = torch.Generator().manual_seed(step)
    prompt = torch.randint(0, 44, (rows, 5), generator=g)
    for _ in range(2):
        rest = torch.randint(0, 44, (rows, length - 5), generator=g)
        words = torch.randint(2, length - 4, (rows, 1), generator=g)
        answer = (torch.arange(length) >= 5) & (torch.arange(length) < 5 + words)
        yield torch.cat([prompt, rest], 1), answer.float()


rank, world = 0, 1
torch.manual_seed(2305)
policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False).eval()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for model in (policy, reference):
        fully_shard(model.embed)
        fully_shard(model)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(1, 6):
    # Chosen and rejected rows go through the model together
    (good, good_words), (bad, bad_words) = ([t.chunk(world)[rank] for t in pair] for pair in pairs(step))
    ids, words = torch.cat([good, bad]), torch.cat([good_words, bad_words])
    with torch.no_grad():
        base = score(reference, ids, words)
    margin = (score(policy, ids, words) - base).chunk(2)
    loss = -F.logsigmoid(0.1 * (margin[0] - margin[1])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in policy.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
