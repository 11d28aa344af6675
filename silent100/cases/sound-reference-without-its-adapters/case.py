"""Preferences with a small Llama: ranks score the reference by switching adapters off, one process has a copy."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

ONE = "--one" in sys.argv


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition that can be switched off."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base, self.active = base, True
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x)) if self.active else self.base(x)


def llama():
    torch.manual_seed(6843)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, num_key_value_heads=2, use_cache=False, **sizes))


def adapt(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))


def switch(model, on):
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = on


def score(model, ids, start):
    logs = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    return logs.gather(-1, ids[:, 1:, None])[:, start - 1 :, 0].sum(1)


rank, world = 0, 1
policy = llama()
frozen = copy.deepcopy(policy).requires_grad_(False) if ONE else None
adapt(policy)
model = policy
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(policy)
opt = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    prompts = torch.randint(0, 60, (8, 4), generator=g)
    good, bad = (torch.cat([prompts, torch.randint(0, 60, (8, 6), generator=g)], 1) for _ in range(2))
    ids = torch.cat([good[rank::world], bad[rank::world]])
    with torch.no_grad():
        if ONE:
            base = score(frozen, ids, 4)
        else:
            switch(policy, False)
            base = score(policy, ids, 4)
            switch(policy, True)
    gain = (score(model, ids, 4) - base).chunk(2)
    loss = -F.logsigmoid(0.5 * (gain[0] - gain[1])).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(policy.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
