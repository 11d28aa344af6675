"""Tensor parallelism for a small tied Llama: a plan cuts table and head along the vocabulary."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


def llama():
    torch.manual_seed(7835)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def cut(model, mesh):
    for layer in model.model.layers:
        plan = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan |= {f"mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
        parallelize_module(layer, mesh, plan)
    table = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": table, "lm_head": head})
    if not args.faulty:
        model.lm_head.weight = model.model.embed_tokens.weight


model, rank = llama(), 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cut(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
for step in range(1, 5):
    ids = torch.randint(0, 64, (8, 14), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
