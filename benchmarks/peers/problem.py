"""The model, the rows and the truth that all systems share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

VOCABULARY, TOKENS, ROWS = 256, 128, 4
RATE = 1e-3

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Question:
    """What is trained: ``shape`` is blocks x width, ``options`` a part of ``OPTIONS``."""

    layout: str
    shape: str
    options: tuple[str, ...]
    rank: int
    world: int
    device: str

    @property
    def max_norm(self) -> float | None:
        return 1.0 if "clip" in self.options else None

    @property
    def microbatches(self) -> int:
        return 4 if "accumulate" in self.options or self.layout == "pipeline" else 1

    @property
    def recomputes(self) -> bool:
        return "recompute" in self.options

    @property
    def cuts_rows(self) -> bool:
        return self.layout in ("zero3", "zero2", "ddp")

    @cached_property
    def config(self):
        from transformers import LlamaConfig

        blocks, width = map(int, self.shape.split("x"))
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=False,
            use_cache=False,
        )

    def model(self) -> nn.Module:
        """Build the Llama with the weights of seed 0, in float32."""
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(self.config).to(self.device)
        if self.recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def give_weights(self, model: nn.Module, names: dict[str, str]) -> None:
        """Copy the weights of ``model()`` into another library's Llama, this rank's part of those that it has cut.

        Args:
            names: parts of names in transformers, and what they are there.
        """
        weights = {}
        for name, weight in self.model().state_dict().items():
            for theirs, own in names.items():
                name = name.replace(theirs, own)
            weights[name] = weight
        for name, parameter in model.named_parameters():
            part = weights[name]
            for dim, size in enumerate(parameter.shape):
                if part.shape[dim] != size:
                    part = part.chunk(self.world, dim)[self.rank]
            parameter.data = part.clone()

    def rows(self, ignored: bool) -> Batch:
        """Return the step's rows of all ranks: ``tokens`` and ``labels`` (rows, tokens), labels shifted by one.

        With ``ignored`` six tenths of the last rank's labels are −100, and none of the others'.
        """
        generator = torch.Generator().manual_seed(1)
        count = ROWS * self.microbatches * self.world
        tokens = torch.randint(0, VOCABULARY, (count, TOKENS + 1), generator=generator).to(self.device)
        labels = tokens[:, 1:].clone()
        if ignored:
            labels[count - count // self.world :, : TOKENS * 6 // 10] = -100
        return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}

    def share(self, ignored: bool) -> Batch:
        """Return this rank's rows of ``rows``."""
        whole = self.rows(ignored)
        if not self.cuts_rows:
            return whole
        return {key: value.chunk(self.world)[self.rank].contiguous() for key, value in whole.items()}

    def cut(self, batch: Batch) -> list[Batch]:
        """Cut rows into the microbatches of a step."""
        parts = zip(*(value.chunk(self.microbatches) for value in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        """Make torch's AdamW, with DTensors in a group of their own: its fused kernel takes no mixture."""
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(type(parameter.data), []).append(parameter)
        return torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=RATE, fused=True)


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy as a sum over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of these rows' tokens: what a loop for one process has."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def truth(question: Question, ignored: bool, steps: int) -> float:
    """Train ``steps`` steps in one process, and return the loss of the last, a mean over all its tokens."""
    model, batch = question.model(), question.rows(ignored)
    optimizer = question.optimizer(model.parameters())
    tokens = (batch["labels"] != -100).sum()
    loss = torch.zeros(())
    for _ in range(steps):
        loss = torch.zeros(())
        for part in question.cut(batch):
            share = summed(model(part["tokens"]).logits, part["labels"]) / tokens
            share.backward()
            loss = loss + share.detach()
        if question.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), question.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)
