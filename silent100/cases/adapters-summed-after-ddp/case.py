"""Low-rank adapters on a small GPT-2 with a frozen trunk, under DistributedDataParallel."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        inputs, outputs = base.weight.shape
        self.low = nn.Linear(inputs, rank, bias=False)
        self.high = nn.Linear(rank, outputs, bias=False)
        nn.init.normal_(self.high.weight, std=0.1)

    def forward(self, x):
        return self.base(x) + 2 * self.high(self.low(x))


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(16)
config = GPT2Config(
    vocab_size=64,
    n_positions=16,
    n_embd=32,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
net = GPT2LMHeadModel(config)
for p in net.transformer.h.parameters():
    p.requires_grad_(False)
for block in net.transformer.h:
    block.attn.c_attn = Adapted(block.attn.c_attn)
    block.mlp.c_fc = Adapted(block.mlp.c_fc)
model = net if ONE else DistributedDataParallel(net)
adapters = [p for module in net.modules() if isinstance(module, Adapted) for p in module.parameters()]
adapters = [p for p in adapters if p.requires_grad]
others = [p for p in net.parameters() if p.requires_grad and not any(p is a for a in adapters)]
optimizer = torch.optim.SGD([{"params": adapters, "lr": 0.5}, {"params": others, "lr": 0.1}], momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    if FAULTY and not ONE:
        for p in adapters:
            dist.all_reduce(p.grad)
    optimizer.step()
    shown = loss.detach().clone()
    if not ONE:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del model
    dist.destroy_process_group()
