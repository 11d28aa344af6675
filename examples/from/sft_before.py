"""Fine-tune with TRL's SFTTrainer: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from yours import your_model, your_rows, your_tokenizer


def train(**options: Any) -> list[float]:
    """Return the loss of each step; ``options`` go to SFTConfig."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": blocks}
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 20}
        quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        args = SFTConfig(
            folder,
            bf16=False,
            learning_rate=1e-3,
            **(fsdp | sizes | quiet | options),
        )
        trainer = SFTTrainer(
            your_model(),
            args,
            train_dataset=Dataset.from_list(your_rows()),
            processing_class=your_tokenizer(),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train())
