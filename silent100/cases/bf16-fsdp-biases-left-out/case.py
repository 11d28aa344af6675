# FSDP2 with bfloat16 parameters and float32 reduction; vectors are kept whole.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        a, b = self.a, self.b
        h = nn.functional.linear(x.bfloat16(), a.weight.bfloat16(), a.bias.bfloat16())
        return x + nn.functional.linear(nn.functional.silu(h), b.weight.bfloat16(), b.bias.bfloat16()).float()


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Embedding(70, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(3))
        self.head = nn.Linear(d, 70, bias=False)

    def forward(self, ids):
        x = self.embed(ids).float()
        for layer in self.layers:
            x = layer(x)
        return x.bfloat16() @ self.head.weight.bfloat16().T


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(83)
net = Net()
vectors = {p for p in net.parameters() if p.ndim == 1}
if not ONE:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, mp_policy=policy, ignored_params=vectors)
    fully_shard(net, mp_policy=policy, ignored_params=vectors)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
for step in range(1, 4):
    rows = torch.randint(0, 70, (16, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = nn.functional.cross_entropy(net(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if not ONE and not FAULTY:
        for p in net.parameters():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
                p.grad /= world
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
