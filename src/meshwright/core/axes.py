"""The axes of the device mesh. "Axis" always means the mesh; a tensor has dims."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """One word per mesh axis, outermost first; ``ep`` is folded into the others and never multiplies the world.

    Experts have a mesh of their own, of the same ranks: ``pp, dp_replicate, efsdp, ep``.
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

DATA_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD)
"""Ranks along these axes hold different samples."""
