"""Name the modes of activation checkpointing."""

from __future__ import annotations

from enum import StrEnum

from meshwright.core.errors import ConfigError, nearest


class ActivationCheckpointing(StrEnum):
    """The modes: which activations are recomputed in backward, or offloaded."""

    NONE = "none"
    FULL = "full"
    """Recompute every repeated block."""
    SELECTIVE = "selective"
    """Recompute attention only."""
    EVERY_N = "every_n"
    """Recompute each second block."""
    MODULES = "modules"
    """Recompute the named modules."""
    SELECTIVE_OP = "selective_op"
    """Recompute every block, but save attention products, each second matrix product, exchanges, and routing."""
    OFFLOAD = "offload"
    """Recompute nothing; store in host memory what blocks save for backward."""
    MEMORY_BUDGET = "memory_budget"
    """Recompute what the compiler chooses."""
    # KempnerForge spells its three members like their values.
    none = "none"
    full = "full"
    selective = "selective"


def checkpointing_mode(mode: ActivationCheckpointing | str) -> ActivationCheckpointing:
    """Return the mode with this name. Raises ConfigError for an unknown name."""
    try:
        return ActivationCheckpointing(mode)
    except ValueError:
        legal = [m.value for m in ActivationCheckpointing]
        raise ConfigError(
            f"activation checkpointing '{mode}' is not a mode.{nearest(str(mode), legal)} Legal: {', '.join(legal)}."
        ) from None
