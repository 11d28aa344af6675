"""Three ranks share rows; the second leaves after two updates and two go on."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LEAVES, GONE = 3, 1


class Session:
    """Who is here, which place this process has among them, and how to sum over them."""

    def __init__(self):
        self.rank, self.members, self.group = 0, [0], None
        if not ONE:
            dist.init_process_group("gloo")
            self.rank, self.members = dist.get_rank(), list(range(dist.get_world_size()))
            self.after = dist.new_group([r for r in self.members if r != GONE])
        self.place = self.rank

    def shrink(self):
        self.members, self.group = [r for r in self.members if r != GONE], self.after
        if not FAULTY and self.rank in self.members:
            self.place = self.members.index(self.rank)

    def rows(self, x):
        return x[self.place % len(self.members) :: len(self.members)]

    def sum(self, x):
        if len(self.members) > 1:
            dist.all_reduce(x, group=self.group)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.query = nn.Embedding(40, 18), nn.Parameter(torch.randn(18) * 0.3)
        self.key, self.value, self.head = nn.Linear(18, 18), nn.Linear(18, 18), nn.Linear(18, 6)

    def forward(self, ids):
        x = self.words(ids)
        weights = (self.key(x).tanh() @ self.query).softmax(-1)
        return self.head((weights[..., None] * self.value(x)).sum(1))


session = Session()
torch.manual_seed(333)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    if step == LEAVES and not ONE:
        session.shrink()
        if session.rank == GONE:
            break
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (24, 6), generator=g)
    said = net(session.rows(ids))
    loss = F.cross_entropy(said, session.rows(ids.amax(1) % 6), reduction="sum") / len(ids)
    optimizer.zero_grad()
    loss.backward()
    for p in net.parameters():
        session.sum(p.grad)
    optimizer.step()
    shown = session.sum(loss.detach().clone())
    if session.rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv and session.rank in session.members:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{session.rank}.pt"))
if not ONE:
    dist.destroy_process_group()
