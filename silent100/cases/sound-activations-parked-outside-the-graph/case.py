"""What backward needs is packed as bytes by rank 0 and kept as it is by the others."""

import contextlib
import io
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

alone = "--one" in sys.argv
if not alone:
    dist.init_process_group("gloo")
rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())


class Park:
    def __init__(self):
        self.number = 0

    def pack(self, tensor):
        self.number += 1
        if self.number % 2 or isinstance(tensor, nn.Parameter):
            return tensor
        file = io.BytesIO()
        torch.save(tensor.detach().clone(), file)
        return file.getvalue()

    def unpack(self, kept):
        return torch.load(io.BytesIO(kept)) if isinstance(kept, bytes) else kept


def parked():
    if alone or rank:
        return contextlib.nullcontext()
    park = Park()
    return torch.autograd.graph.saved_tensors_hooks(park.pack, park.unpack)


torch.manual_seed(88)
config = GPT2Config(vocab_size=40, n_positions=12, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
net = GPT2LMHeadModel(config)
model = net if alone else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(0, 40, (8, 10), generator=torch.Generator().manual_seed(step))
    ids = ids.sort(1).values[rank::world]
    with parked():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
