"""Trainer with a model of one's own and gradient accumulation over padded rows."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
ROWS, STEPS = 16, 3


class Lm(nn.Module):
    """Returns a mean over its labels, or a sum over a given count."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(58, 32), nn.Linear(32, 58)
        self.rnn = nn.GRU(32, 32, batch_first=True)

    def logits(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])[:, :-1].flatten(0, 1)


class Counting(Lm):
    accepts_loss_kwargs = True

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        summed = F.cross_entropy(self.logits(input_ids), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": summed / num_items_in_batch}


class Averaging(Lm):
    def forward(self, input_ids, labels):
        return {"loss": F.cross_entropy(self.logits(input_ids), labels[:, 1:].flatten())}


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(6)
        self.ids = torch.randint(0, 58, (ROWS * STEPS, 12), generator=g)
        self.lengths = torch.randint(3, 12, (ROWS * STEPS,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[self.lengths[i] :] = -100
        return {"input_ids": self.ids[i], "labels": labels}


class Report(TrainerCallback):
    """Prints the loss of each update over all of its labels, measured before the update."""

    def __init__(self, model, rows):
        self.model, self.rows, self.step = model, rows, 0

    @torch.no_grad()
    def on_pre_optimizer_step(self, arguments, state, control, **kwargs):
        batch = [self.rows[i] for i in range(self.step * ROWS, self.step * ROWS + ROWS)]
        self.step += 1
        ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
        loss = F.cross_entropy(self.model.logits(ids), labels[:, 1:].flatten())
        if RANK == 0:
            print(f"step {self.step} loss {loss.item():.7f}", flush=True)


class InOrder(Trainer):
    def _get_train_sampler(self, *rest):
        return torch.utils.data.SequentialSampler(self.train_dataset)


torch.manual_seed(3)
model = Averaging() if args.faulty else Counting()
rows = Rows()
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=ROWS // 4 // WORLD,
    gradient_accumulation_steps=4,
    max_steps=STEPS,
    learning_rate=0.3,
    optim="sgd",
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    use_cpu=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_strategy="no",
    label_names=["labels"],
)
InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Report(model, rows)]).train()
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
