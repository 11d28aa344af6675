"""Define what adapters are asked for, and check the values. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.core.errors import ConfigError

ALL_LINEAR = "all-linear"
RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rank": ("1 or more", lambda value: value >= 1),
    "alpha": ("a finite number above 0", lambda value: 0 < value < math.inf),
    "dropout": ("0 or more and below 1", lambda value: 0 <= value < 1),
    "targets": ("not empty", lambda value: len(value) > 0),
    "targets[]": ("not empty", lambda value: len(value) > 0),
    "modules_to_save[]": ("not empty", lambda value: len(value) > 0),
}
"""A description of each value's range, and the test whether a value lies in it; ``[]`` stands for each item."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, which are trained instead of the model (https://arxiv.org/abs/2106.09685); made by peft."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora: the adapter's output times alpha / rank; rslora: times alpha / sqrt(rank)
    (https://arxiv.org/abs/2312.03732); dora: as lora, and each row of the sum of weight and adapter is brought to a
    length that is trained (https://arxiv.org/abs/2402.09353)."""
    rank: int = 16
    """Rank of each adapter: features between its two matrices."""
    alpha: float = 32.0
    """Numerator of the factor of the adapters' output."""
    dropout: float = 0.0
    """Probability that a feature of an adapter's input is zeroed."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers beside which adapters stand: names (q_proj) or ends of paths (self_attn.q_proj), * for one part of a path
    (layers.*.mlp.up_proj); all-linear: every linear layer of the blocks."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters, named as targets are: lm_head."""

    def check(self, where: str = "adapters") -> None:
        """Check the values' ranges.

        Raises:
            ConfigError: a value out of its range; names key, value and range.
        """
        for key, (words, is_legal) in RANGES.items():
            name = key.removesuffix("[]")
            value = getattr(self, name)
            for one in value if key != name else (value,):
                if not is_legal(one):
                    raise ConfigError(f"{where}.{name} = {one!r} is out of range: it must be {words}.")
