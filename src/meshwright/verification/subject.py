"""Build the subject of a verification from a config: its model, batches of its shape, its techniques."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psutil

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.training.config import Config
from meshwright.training.model_source import causal_lm, decoder_config, planned_tokenizer

from .problem import GAP, Problem, RandomBatches, shrunk
from .verify import default_batches

BYTES_PER_PARAMETER = 2 * 8 * 7
"""Bytes per parameter of one process and a layout in float64.

Each holds weight, gradient, two moments, and copies of gradient and weights (twice) to compare."""


@dataclass(frozen=True)
class Subject:
    """The inputs of ``verify``."""

    model: Any
    batches: RandomBatches
    techniques: dict[str, Any]

    def batches_for(self, world: int) -> RandomBatches:
        """Return the batches, with as many more rows as ``world`` ranks need to divide them."""
        return replace(self.batches, rows=world * -(-self.batches.rows // world))


def subject_of(config: Config, factory: str | None, world: int, *, shrink: bool) -> Subject:
    """Take the model of a config (or "package.module:factory"), and batches of its shape.

    Args:
        world: the largest number of ranks.
        shrink: make the model small.

    Raises:
        ConfigError: a model too large for this machine.
        UnsupportedError: a factory's model cannot be shrunk.
    """
    techniques = to_dict(config.requested)
    del techniques["precision"], techniques["adapters"]
    if config.adapters is not None:
        techniques["adapters"] = to_dict(config.adapters)
    if factory is not None:
        if shrink:
            raise UnsupportedError(
                "--shrink makes the decoder of a config smaller, not your own model: let its factory build a small one"
            )
        model: Any = factory
        batches = default_batches(model, world)
    else:
        if config.model.hf:
            return _of_hugging_face(causal_lm(config), config, techniques, world, shrink=shrink)
        model = decoder_config(config, planned_tokenizer(config))
        model = shrunk(model) if shrink else model
        seq_len = min(config.data.seq_len, model.max_seq_len - GAP - 3, 32 if shrink else config.data.seq_len)
        batches = RandomBatches(model.vocab_size, config.batch.global_batch, max(seq_len, 1))
    check_size(model, BYTES_PER_PARAMETER, f"one process and a layout of {world} ranks in float64")
    return Subject(model, batches, techniques)


def _of_hugging_face(
    model: CausalLM, config: Config, techniques: dict[str, Any], world: int, *, shrink: bool
) -> Subject:
    """Build a Hugging Face model's subject; its weights are drawn, in float64 and float32, so only sizes count."""
    if shrink:
        raise UnsupportedError(
            "--shrink makes the decoder of a config smaller, not a Hugging Face model: write a smaller config.json"
            " and give it as model.hf"
        )
    check_size(model, BYTES_PER_PARAMETER, f"one process and a layout of {world} ranks in float64")
    batches = replace(default_batches(model, world), rows=config.batch.global_batch)
    return Subject(model, batches, techniques)


def check_size(model: Any, bytes_per_parameter: int, what: str) -> None:
    """Refuse a model that this machine's free memory does not hold, by a ConfigError."""
    numel = model_facts(as_module(Problem(model, RandomBatches(1)).source())).numel
    needed, free = numel * bytes_per_parameter, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the model has {numel:,} parameters: {what} need about {bytes_text(needed)}, and {bytes_text(free)} are"
            f" free here. --shrink makes a small model of the same structure; for a trace, lower model.n_layers"
        )
