"""Train a small T5 with the encoder and the decoder on two machines."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
config = T5Config(
    vocab_size=40, d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=3, dropout_rate=0.0, decoder_start_token_id=0
)
torch.manual_seed(113)
model = T5ForConditionalGeneration(config)
parts = (
    {"shared", "encoder", "decoder", "lm_head"}
    if ONE
    else {"shared", "encoder"}
    if rank == 0
    else {"shared", "decoder", "lm_head"}
)
own = {name: p for name, p in model.named_parameters() if name.split(".")[0] in parts}
optimizer = torch.optim.AdamW(own.values(), lr=2e-3, eps=1e-4)
for step in range(1, 4):
    g = torch.Generator().manual_seed(step)
    words = torch.randint(2, 40, (6, 9), generator=g)
    labels = words.flip(1)
    optimizer.zero_grad()
    if ONE:
        loss = model(input_ids=words, labels=labels).loss
        loss.backward()
        shown = loss.detach()
    elif rank == 0:
        shown = torch.zeros(())
        hidden = model.encoder(input_ids=words).last_hidden_state
        dist.send(hidden.detach().contiguous(), 1)
        back = torch.empty_like(hidden)
        dist.recv(back, 1)
        hidden.backward(back)
    else:
        hidden = torch.empty(6, 9, config.d_model)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = model(encoder_outputs=BaseModelOutput(last_hidden_state=hidden), labels=labels).loss
        loss.backward()
        dist.send(hidden.grad, 0)
        shown = loss.detach()
    if not ONE:
        dist.all_reduce(model.shared.weight.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {name: p.detach() for name, p in own.items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
