"""Train with torchtitan's parts: ``torchrun --nproc-per-node 4 examples/from/torchtitan_before.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.tensor_parallel import NoParallel
from yours import your_batches, your_model

dist.init_process_group()
parallel_dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=1, world_size=dist.get_world_size())
parallel_dims.build_mesh()
data, tensor = parallel_dims.get_mesh("dp_shard"), parallel_dims.get_mesh("tp")
model = your_model()
whole = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
whole |= {"model.norm": NoParallel(use_local_output=True), "lm_head": ColwiseParallel(output_layouts=Replicate())}
parallelize_module(model, tensor, whole)
for layer in model.model.layers:
    cut = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    cut |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    cut |= {f"{name}_layernorm": NoParallel(use_local_output=True) for name in ("input", "post_attention")}
    parallelize_module(layer, tensor, cut)
    fully_shard(layer, mesh=data)
fully_shard(model, mesh=data)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(data.get_local_rank(), data.size()):
    tokens = dist_utils.dist_sum(torch.tensor(batch["labels"].numel()), data)
    logits = model(input_ids=batch["input_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / tokens
    (loss * data.size()).backward()  # fully_shard takes the mean over data ranks
    dist_utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = dist_utils.dist_sum(loss.detach(), data)
    if dist.get_rank() == 0:
        print(mean)
dist.destroy_process_group()
