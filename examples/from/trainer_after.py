"""Train with transformers.Trainer: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import TrainingArguments
from yours import padded, your_model, your_rows

from meshwright import Layout
from meshwright.integrations.transformers import Trainer


def train(layout: Layout = Layout(dp_shard=2), **options: Any) -> list[float]:  # noqa: B008  (a frozen value)
    """Return the loss of each step; ``options`` go to TrainingArguments."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 20}
        quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        args = TrainingArguments(
            folder,
            learning_rate=3e-3,
            max_grad_norm=0.5,
            **(sizes | quiet | options),
        )
        trainer = Trainer(
            your_model(),
            args,
            train_dataset=your_rows(),
            data_collator=padded,
            layout=layout,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train())
