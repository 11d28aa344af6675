"""Name the axes of the device mesh; "axis" always means the mesh, and a tensor has dims."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """A mesh axis, listed outermost first; ``ep`` is folded into the others and never multiplies the world size.

    Experts have their own mesh of the same ranks: ``pp, dp_replicate, efsdp, ep``.
    """

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EFSDP = "efsdp"


WORLD_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""The axes whose sizes multiply to the world size, in mesh order."""
