"""What one process does not compute twice alike cannot be compared with anything: refused, with the place."""

from __future__ import annotations

import os
import time

import pytest
import torch
from support.composed import Rotary
from support.problems import UNTIED
from test_verify import DDP, even
from torch import nn

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.verification.verify import verify


def from_the_global_stream(step: int):
    return even(step) | {"tokens": torch.randint(0, 257, (4, 8))}


def from_the_process(step: int):
    return even(step + os.getpid() if step else 0)


class Following:
    """Gives the next batch, whichever is asked for."""

    def __init__(self):
        self.given = 0

    def __call__(self, step: int):
        self.given += 1
        return even(self.given)


class RandomBuffer(Rotary):
    def reset_parameters(self) -> None:
        self.inv_freq.copy_(torch.rand(4, generator=torch.Generator(device="cpu").manual_seed(time.monotonic_ns())))


class RandomDepth(nn.Module):
    vocab_size = 257

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1 + time.monotonic_ns() // 1000 % 97)))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class RandomBackward(Rotary):
    def forward(self, tokens):
        logits = super().forward(tokens)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
        return logits


class InfiniteSlope(Rotary):
    """A square root at zero: its value is fine, its slope is not."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits + (logits - logits.detach()).sqrt()


@pytest.mark.parametrize(
    ("model", "batches", "error", "words"),
    [
        (
            UNTIED,
            from_the_global_stream,
            IntegrityError,
            "the batch of step 1 is not the same in two calls by one process",
        ),
        (
            UNTIED,
            Following(),
            IntegrityError,
            "the batch of step 1 is not the same in two calls.*seeded by the step alone",
        ),
        (UNTIED, from_the_process, IntegrityError, "the batch of step 2 is not the same on ranks 0 and 1"),
        (
            RandomBuffer,
            even,
            IntegrityError,
            r"begin with different buffers \(first: inv_freq\).*Seed it inside the factory",
        ),
        (RandomDepth, even, IntegrityError, r"begin with different weights \(first: blocks"),
        (
            RandomBackward,
            even,
            IntegrityError,
            r"give different gradients \(first: embedding.weight\).*the backward draws random numbers",
        ),
        (InfiniteSlope, even, ConfigError, "the gradient norm of step 1 is nan in one process already"),
    ],
)
def test_refusals_teach(pool, model, batches, error, words):
    with pytest.raises(error, match=words):
        verify(model, DDP, batches, steps=2, pool=pool)
