import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
JOINS = 4


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.user = nn.Embedding(50, 18), nn.Embedding(30, 18)
        self.score = nn.Sequential(nn.LayerNorm(18), nn.Linear(18, 18), nn.Tanh(), nn.Linear(18, 1))

    def forward(self, users, items):
        return self.score(self.user(users) * self.item(items)).squeeze(-1)


def catch_up(model, optimizer):
    """Rank 1 takes over everything from rank 0."""
    moments = [None]
    if dist.get_rank() == 0:
        moments = [optimizer.state_dict()]
    dist.broadcast_object_list(moments)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    if dist.get_rank() == 1:
        optimizer.load_state_dict(moments[0])


def main():
    rank = 0
    if not ONE:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = Ranker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    for step in range(1, 8):
        members = 1 if ONE or step < JOINS else 2
        if not ONE and step == JOINS:
            catch_up(model, optimizer)
        shown = torch.zeros(())
        if rank < members:
            g = torch.Generator().manual_seed(step)
            users, items = torch.randint(0, 30, (16,), generator=g), torch.randint(0, 50, (2, 16), generator=g)
            mine = slice(rank * 16 // members, (rank + 1) * 16 // members)
            margin = model(users[mine], items[0, mine]) - model(users[mine], items[1, mine])
            loss = F.softplus(-margin).mean() / members
            optimizer.zero_grad()
            loss.backward()
            shown = loss.detach()
            if members == 2:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            optimizer.step()
        if not ONE:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
