"""Low-rank adapters with dropout on a small Llama under accelerate; masks are each rank's own."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(9)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=44,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
)
lora = LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
net = get_peft_model(base, lora)
torch.manual_seed(1000 + rank)
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
model, optimizer = accelerator.prepare(net, optimizer)
for step in range(1, 6):
    ids = torch.randint(0, 44, (12, 10), generator=torch.Generator().manual_seed(step))
    ids[:, 5:] = ids[:, :5]
    mine = ids[rank::world]
    logits = model(input_ids=mine[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    shown = accelerator.reduce(loss.detach(), "mean")
    if accelerator.is_main_process:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    kept = {k: v for k, v in accelerator.unwrap_model(model).state_dict().items() if "lora" in k}
    torch.save(kept, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
accelerator.free_memory()
del model
accelerator.end_training()
