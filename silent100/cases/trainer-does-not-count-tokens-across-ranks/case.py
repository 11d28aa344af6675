"""transformers' Trainer on prompts and answers of unequal length."""

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
GLOBAL_ROWS, STEPS = 8, 3


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=24, length=14):
        g = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 64, (count, length), generator=g)
        self.labels = self.ids.clone()
        for i, answer in enumerate(torch.randint(2, length, (count,), generator=g).tolist()):
            self.labels[i, : length - answer] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class Print(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.7f}", flush=True)


class Exact(Trainer):
    """Logs losses unrounded."""

    def log(self, logs, *rest, **kwargs):
        if "loss" in logs:
            logs["loss"] = self.exact
        super().log(logs, *rest, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        with torch.no_grad():
            labels = inputs["labels"][:, 1:]
            logits = self.model(input_ids=inputs["input_ids"]).logits[:, :-1]
            summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            both = self.accelerator.reduce(torch.stack([summed, (labels != -100).sum().float()]), "sum")
        self.exact = (both[0] / both[1]).item()
        return loss


def main():
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
        )
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GLOBAL_ROWS // world,
        max_steps=STEPS,
        use_cpu=True,
        learning_rate=0.2,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        seed=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        average_tokens_across_devices=not args.faulty,
    )
    trainer = Exact(model=model, args=arguments, train_dataset=Rows(), callbacks=[Print()])
    trainer.train()
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{arguments.process_index}.pt"))


if __name__ == "__main__":
    main()
