import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
V, D, T, B = 41, 16, 10, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(D, 24, bias=False),
            nn.Linear(D, 24, bias=False),
            nn.Linear(24, D, bias=False),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, remat):
        super().__init__()
        self.remat = remat
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.remat else layer(x)
        return self.head(x)


torch.manual_seed(88)
model = Decoder(remat=not args.one)
if not args.one:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
text = torch.randint(0, V, (48, T + 1))

for step in range(1, 6):
    ids = text[(step - 1) * B : step * B].chunk(world)[rank]
    micros = [ids] if args.one else ids.chunk(2)
    opt.zero_grad()
    total = torch.zeros(())
    for i, m in enumerate(micros):
        if not args.one:
            model.set_requires_gradient_sync(i == len(micros) - 1)
        loss = F.cross_entropy(model(m[:, :-1]).flatten(0, 1), m[:, 1:].flatten()) / len(micros)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    if world > 1:
        dist.all_reduce(total)
        total /= world
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)

if args.save:
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    torch.save(state, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
