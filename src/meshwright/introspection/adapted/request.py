"""Define what adapters are asked for, and check the values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.core.config.ranges import ABOVE_0, BELOW_1, FROM_1, NOT_EMPTY, check_ranges

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, which are trained instead of the model (https://arxiv.org/abs/2106.09685); made by peft."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora: the adapter's output times alpha / rank; rslora: times alpha / sqrt(rank)
    (https://arxiv.org/abs/2312.03732); dora: as lora, and each row of the sum of weight and adapter is brought to a
    length that is trained (https://arxiv.org/abs/2402.09353)."""
    rank: Annotated[int, FROM_1] = 16
    """Rank of each adapter: features between its two matrices."""
    alpha: Annotated[float, ABOVE_0] = 32.0
    """Numerator of the factor of the adapters' output."""
    dropout: Annotated[float, BELOW_1] = 0.0
    """Probability that a feature of an adapter's input is zeroed."""
    targets: Annotated[tuple[Annotated[str, NOT_EMPTY], ...], NOT_EMPTY] = (ALL_LINEAR,)
    """Layers beside which adapters stand: names (q_proj) or ends of paths (self_attn.q_proj), * for one part of a path
    (layers.*.mlp.up_proj); all-linear: every linear layer of the blocks."""
    modules_to_save: tuple[Annotated[str, NOT_EMPTY], ...] = ()
    """Modules that are trained whole beside the adapters, named as targets are: lm_head."""

    def check(self, where: str = "adapters") -> None:
        """Check the values' ranges.

        Raises:
            ConfigError: a value out of its range; names key, value and range.
        """
        check_ranges(self, where)
