import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen2Config, Qwen2ForCausalLM

PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def get_model():
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=46,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    model, rank = get_model(), 0
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, foreach=False)
    for step in range(1, 5):
        ids = torch.randint(0, 46, (6, 11), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
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


main()
