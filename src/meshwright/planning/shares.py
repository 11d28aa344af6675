"""Define the mesh axes along which ranks hold other samples, tokens, parameters and experts.

Loss, norms, routing, FSDP's mesh, loaders, audits and the plan's messages read the axes here and nowhere else, so a new
axis is named once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.axes import WORLD_AXES, Axis

from .layout import Layout

SAMPLES = (Axis.DP_REPLICATE, Axis.DP_SHARD)
"""Axes along which ranks hold other rows of the batch."""
TOKENS = (Axis.CP,)
"""Axes along which ranks hold other tokens of the same rows, from embedding to loss."""
BATCH = (*SAMPLES, *TOKENS)
"""Axes over which counts and losses of tokens are summed."""
SHARDS = (Axis.DP_SHARD, Axis.CP)
"""Axes over which fully_shard cuts dense parameters, as one: ranks that hold other tokens of a row use the same
weights.
"""
REPLICAS = (Axis.DP_REPLICATE,)
"""Axes along which ranks hold equal experts, and equal shards of all else, whose gradients are summed."""
EXPERTS = (*SHARDS, Axis.TP)
"""Axes whose ranks form the expert mesh of a stage: efsdp × ep."""


@dataclass(frozen=True)
class Shares:
    """The shares of one mesh, under one plan.

    Attributes:
        mesh: axis -> size; missing axes have size 1.
        sharded: whether dense parameters are cut over ``SHARDS``, or over ``dp_shard`` alone.
        cuts_sequences: whether ranks of the tensor axis hold other tokens of the same rows between blocks.
        replicates_tokens: whether ranks with other tokens of the same rows hold copies of the parameters, not shards.
    """

    mesh: Mapping[str, int]
    sharded: bool = False
    cuts_sequences: bool = False
    replicates_tokens: bool = False

    def size(self, *axes: Axis) -> int:
        """Count the ranks along these axes together."""
        return math.prod(self.mesh.get(axis.value, 1) for axis in axes)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold other samples."""
        return self.size(*SAMPLES)

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that hold other tokens of the batch: of other rows, or of other parts of the same rows."""
        return self.size(*BATCH)

    @property
    def shard_axes(self) -> tuple[Axis, ...]:
        """Axes over which fully_shard cuts dense parameters, as one; none without it."""
        whole = TOKENS if self.replicates_tokens else ()
        return tuple(axis for axis in SHARDS if axis not in whole) if self.sharded else ()

    @property
    def replica_axes(self) -> tuple[Axis, ...]:
        """Axes along which ranks hold equal dense parameters, or equal shards, and sum their gradients."""
        return tuple(axis for axis in BATCH if axis not in self.shard_axes)

    @property
    def copies(self) -> tuple[Axis, ...]:
        """Axes over which parameters are replicated, each rank computing the norm of its own copy."""
        return (*self.replica_axes, Axis.TP)

    @property
    def shards(self) -> int:
        """Number of parts that fully_shard cuts a dense parameter in; 1 without it."""
        return self.size(*self.shard_axes)

    @property
    def replicas(self) -> int:
        """Number of ranks with equal dense parameters, or equal shards."""
        return self.size(*self.replica_axes)

    @property
    def routed(self) -> tuple[Axis, ...]:
        """Axes along which routers get other tokens."""
        return (*BATCH, *((Axis.TP,) if self.cuts_sequences else ()))


def shares_of(layout: Layout, technique: str = "", *, replicates_tokens: bool = False) -> Shares:
    """Return the shares of a resolved layout, before it is known whether the tensor axis cuts sequences."""
    sizes = {axis.value: layout.size(axis) for axis in WORLD_AXES}
    return Shares(sizes, technique == "fully_shard", replicates_tokens=replicates_tokens)
