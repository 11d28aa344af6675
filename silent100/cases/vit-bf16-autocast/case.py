import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class ViT(nn.Module):
    def __init__(self, d=24, n=16):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, n + 1, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 5)

    def forward(self, img):
        x = self.patch(img).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


def bf16_hook(state, bucket):
    small = bucket.buffer().div(world).bfloat16()
    parts = [torch.empty_like(small) for _ in range(world)]
    work = dist.all_gather(parts, small, async_op=True).get_future()
    return work.then(lambda _: torch.stack([p.float() for p in parts]).sum(0))


torch.manual_seed(70)
vit = ViT()
model = vit
if not args.one:
    model = DDP(vit)
    model.register_comm_hook(None, bf16_hook)
opt = torch.optim.AdamW(vit.parameters(), lr=1e-3)
images, labels = torch.randn(120, 3, 16, 16), torch.randint(0, 5, (120,))
for step in range(1, 7):
    rows = slice((step - 1) * 20, step * 20)
    x, y = images[rows].chunk(world)[rank], labels[rows].chunk(world)[rank]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        loss /= world
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(vit.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
