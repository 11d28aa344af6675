"""What a config asks to be verified: its model, batches of its shape, its techniques."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psutil

from meshwright.core.config import to_dict
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.units import bytes_text
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.training.build import decoder_config
from meshwright.training.config import Config
from meshwright.training.tokenizer import planned_tokenizer

from .problem import GAP, Problem, RandomBatches
from .shrink import shrunk
from .verify import default_batches

BYTES_PER_PARAMETER = 8 * 6
"""In float64: weight, gradient, two moments, and copies of weight and gradient to compare."""


@dataclass(frozen=True)
class Subject:
    """What ``verify`` is given."""

    model: Any
    batches: RandomBatches
    techniques: dict[str, Any]

    def batches_for(self, world: int) -> RandomBatches:
        """The batches, with as many more rows as it takes for that many ranks to share them."""
        return replace(self.batches, rows=world * -(-self.batches.rows // world))


def subject_of(config: Config, factory: str | None, world: int, *, shrink: bool) -> Subject:
    """The model of a config (or "package.module:factory"), and batches of its shape.

    Args:
        world: the largest number of ranks.
        shrink: make the model small.

    Raises:
        ConfigError: a model too large for this machine.
        UnsupportedError: a factory's model cannot be shrunk.
    """
    techniques = to_dict(config.techniques)
    techniques.pop("precision")
    if factory is not None:
        if shrink:
            raise UnsupportedError("--shrink makes the decoder of a config smaller, not your own model: let its factory build a small one")
        model: Any = factory
        batches = default_batches(model, world)
    else:
        model = decoder_config(config, planned_tokenizer(config))
        model = shrunk(model) if shrink else model
        seq_len = min(config.data.seq_len, model.max_seq_len - GAP - 3, 32 if shrink else config.data.seq_len)
        batches = RandomBatches(model.vocab_size, config.batch.global_batch, max(seq_len, 1))
    _check_size(model, world)
    return Subject(model, batches, techniques)


def _check_size(model: Any, world: int) -> None:
    numel = model_facts(as_module(Problem(model, RandomBatches(1)).source())).numel
    needed, free = numel * BYTES_PER_PARAMETER * 2, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the model has {numel:,} parameters: one process and a layout of {world} ranks need about {bytes_text(needed)} in float64, and"
            f" {bytes_text(free)} are free here. --shrink makes a small model of the same structure"
        )
