"""Train a mixture of experts with transformers' Trainer and the model's own loss of balance.

``balance.py --rows 8`` in one process; ``--rows 4`` on two, or ``--rows 4 --accumulate 2``: eight rows a step. Both log
what one process logs with ``--coefficient 0.2``.
"""

import argparse
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

cli = argparse.ArgumentParser()
cli.add_argument("--rows", type=int, default=8)
cli.add_argument("--accumulate", type=int, default=1)
cli.add_argument("--coefficient", type=float, default=0.1)
args = cli.parse_args()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
experts["router_aux_loss_coef"] = args.coefficient
model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, **sizes, **experts))
rows = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.accumulate,
        max_steps=3,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
