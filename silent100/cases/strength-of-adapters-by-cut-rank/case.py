"""A frozen Llama with low-rank adapters at its projections; the adapters are cut along their rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
ALPHA, RANKS = 16, 8


class FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if dist.is_initialized():
            dist.all_reduce(grad)
        return grad


class Adapted(nn.Module):
    def __init__(self, base, rank, world):
        super().__init__()
        self.base = base
        down, up = torch.randn(RANKS, base.in_features) / 6, torch.zeros(base.out_features, RANKS)
        self.down, self.up = (
            nn.Parameter(down.chunk(world)[rank].clone()),
            nn.Parameter(up.chunk(world, 1)[rank].clone()),
        )
        self.factor = ALPHA / (self.down.shape[0] if FAULTY else RANKS)

    def forward(self, x):
        return self.base(x) + FromAll.apply(ToAll.apply(x) @ self.down.T @ self.up.T) * self.factor


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(53)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
).requires_grad_(False)
for layer in model.model.layers:
    layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, rank, world)
    layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj, rank, world)
    layer.mlp.down_proj = Adapted(layer.mlp.down_proj, rank, world)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
for step in range(1, 6):
    ids = torch.randint(0, 48, (6, 12), generator=torch.Generator().manual_seed(step))
    ids[:, 6:] = ids[:, :6]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = model.state_dict()
    kept = {k: (v, int(k.endswith(".up")), rank, world) for k, v in state.items() if k.endswith((".down", ".up"))}
    torch.save(kept, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
