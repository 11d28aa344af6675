import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class LoRA(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.scale * self.b @ self.a
        return self.base


torch.manual_seed(42)
cfg = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
lm = LlamaForCausalLM(cfg).requires_grad_(False)
for layer in lm.model.layers:
    for name in ("q_proj", "v_proj"):
        setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
adapters = [p for p in lm.parameters() if p.requires_grad]
opt = torch.optim.SGD(adapters, lr=2.0, momentum=0.9)
model = lm if args.one else DistributedDataParallel(lm)

docs = [torch.randint(1, 64, (int(n),)) for n in torch.randint(5, 20, (40,))]
for step in range(1, 6):
    batch = docs[(step - 1) * 8 : step * 8]
    tokens = sum(len(d) - 1 for d in batch)
    mine = batch[rank::world]
    ids = nn.utils.rnn.pad_sequence(mine, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(mine, batch_first=True, padding_value=-100)
    logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits
    loss = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    opt.zero_grad()
    (loss * world / tokens).backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / tokens:.7f}", flush=True)

for layer in lm.model.layers:
    for name in ("q_proj", "v_proj"):
        setattr(layer.self_attn, name, getattr(layer.self_attn, name).merge())
if args.save:
    torch.save(lm.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
