"""Decide which stacks of experts are distributed, and over which mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.core.axes import Axis
from meshwright.core.names import is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.experts import Stack
from meshwright.planning.layout import Layout
from meshwright.planning.shares import EXPERTS, shares_of

EXPERT_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.EFSDP, Axis.EP)
"""Axes of the expert mesh, outermost first: the ranks of dp_shard, cp and tp, in other rows and columns."""


@dataclass(frozen=True)
class ExpertPlan:
    """The work of every rank of the expert axis.

    Attributes:
        mesh: the axes of the expert mesh and their sizes.
        stacks: the stacks of which each rank of ``ep`` has a share; ranks of ``efsdp`` shard that share.
    """

    mesh: tuple[tuple[str, int], ...]
    stacks: tuple[Stack, ...]

    @property
    def ranks(self) -> int:
        return dict(self.mesh)[Axis.EP.value]

    @property
    def shards(self) -> int:
        return dict(self.mesh)[Axis.EFSDP.value]

    def has(self, name: str) -> bool:
        """Return whether a parameter belongs to distributed experts."""
        return any(owner(name) == stack.path for stack in self.stacks)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's share of a stack's parameter, before it is sharded."""
        return (shape[0] // self.ranks, *shape[1:])

    def sharded_dim(self, shape: tuple[int, ...]) -> int:
        """Return the dim along which a rank's share is sharded: that of experts, or if uneven, one inside them."""
        experts, *inner = self.local_shape(shape)
        return 1 if experts % self.shards and inner[0] % self.shards == 0 else 0

    def padded(self, shape: tuple[int, ...]) -> int:
        """Count the elements of a rank's share, padded to a multiple of the shards, as FSDP2 sends it."""
        local = list(self.local_shape(shape))
        dim = self.sharded_dim(shape)
        local[dim] = -(-local[dim] // self.shards) * self.shards
        return math.prod(local)

    def placements(self, shape: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
        """List (axis, "Shard(dim)" or "Replicate()") of a stack's parameter on the axes larger than 1."""
        places = {Axis.EFSDP.value: f"Shard({self.sharded_dim(shape)})", Axis.EP.value: "Shard(0)"}
        return tuple(
            (axis, places.get(axis, "Replicate()")) for axis, size in self.mesh if size > 1 and axis != Axis.PP
        )

    def only(self, blocks: tuple[str, ...]) -> ExpertPlan | None:
        """Restrict the plan to some blocks; None if they have no experts."""
        stacks = tuple(stack for stack in self.stacks if any(is_within(stack.path, block) for block in blocks))
        return replace(self, stacks=stacks) if stacks else None


def without_experts(facts: ModelFacts, experts: ExpertPlan | None) -> ModelFacts:
    """Leave distributed experts out of the facts."""
    return (
        facts
        if experts is None
        else replace(facts, parameters=tuple(p for p in facts.parameters if not experts.has(p.name)))
    )


def expert_mesh_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the expert mesh of a resolved layout whose ``ep`` divides dp_shard * cp * tp."""
    sizes = {
        Axis.PP: layout.pp,
        Axis.DP_REPLICATE: layout.dp_replicate,
        Axis.EFSDP: sharing_ranks(layout) // layout.ep,
        Axis.EP: layout.ep,
    }
    return tuple((axis.value, sizes[axis]) for axis in EXPERT_AXES)


def sharing_ranks(layout: Layout) -> int:
    """Count the ranks among which experts can be distributed."""
    return shares_of(layout).size(*EXPERTS)
