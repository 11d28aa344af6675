"""Fine-tune with TRL's SFTTrainer: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from trl import SFTConfig
from yours import your_model, your_rows, your_tokenizer

from meshwright import Layout
from meshwright.integrations.trl import SFTTrainer


def train(layout: Layout = Layout(dp_shard=2), **options: Any) -> list[float]:  # noqa: B008  (a frozen value)
    """Return the loss of each step; ``options`` go to SFTConfig."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 20}
        quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        args = SFTConfig(
            folder,
            bf16=False,
            learning_rate=1e-3,
            **(sizes | quiet | options),
        )
        trainer = SFTTrainer(
            your_model(),
            args,
            train_dataset=Dataset.from_list(your_rows()),
            processing_class=your_tokenizer(),
            layout=layout,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train())
