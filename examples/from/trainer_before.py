"""Train with transformers.Trainer: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import Trainer, TrainingArguments
from yours import padded, your_model, your_rows


def train(**options: Any) -> list[float]:
    """Return the loss of each step; ``options`` go to TrainingArguments."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": blocks}
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 20}
        quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        args = TrainingArguments(
            folder,
            learning_rate=3e-3,
            max_grad_norm=0.5,
            **(fsdp | sizes | quiet | options),
        )
        trainer = Trainer(
            your_model(),
            args,
            train_dataset=your_rows(),
            data_collator=padded,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train())
