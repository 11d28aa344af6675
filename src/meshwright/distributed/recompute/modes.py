"""Name the modes of recomputation."""

from __future__ import annotations

from enum import StrEnum

from meshwright.core.errors import ConfigError, nearest


class ActivationCheckpointing(StrEnum):
    """The modes: what is recomputed in backward, or kept elsewhere."""

    NONE = "none"
    FULL = "full"
    """Every repeated block."""
    SELECTIVE = "selective"
    """Attention only."""
    EVERY_N = "every_n"
    """Each second block."""
    MODULES = "modules"
    """Modules that are named."""
    SELECTIVE_OP = "selective_op"
    """Every block, but not attention products, each second matrix product, what other ranks sent, and the choice of
    experts.
    """
    OFFLOAD = "offload"
    """Nothing; what blocks save for backward waits in host memory."""
    MEMORY_BUDGET = "memory_budget"
    """What the compiler chooses."""


def checkpointing_mode(mode: ActivationCheckpointing | str) -> ActivationCheckpointing:
    """Return the mode of that name. Raises ConfigError for another."""
    try:
        return ActivationCheckpointing(mode)
    except ValueError:
        legal = [m.value for m in ActivationCheckpointing]
        raise ConfigError(
            f"activation checkpointing '{mode}' is not a mode.{nearest(str(mode), legal)} Legal: {', '.join(legal)}."
        ) from None
