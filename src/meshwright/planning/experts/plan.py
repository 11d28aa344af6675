"""Expert parallelism, decided: which stacks of experts are shared out, over which mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.core.axes import Axis
from meshwright.core.names import is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.experts import Stack
from meshwright.planning.layout import Layout

EXPERT_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.EFSDP, Axis.EP)
"""Of the expert mesh, outermost first: the ranks of dp_shard, cp and tp, in other rows and columns."""


@dataclass(frozen=True)
class ExpertPlan:
    """What every rank of the expert axis does.

    Attributes:
        mesh: the expert mesh: its axes and their sizes.
        stacks: each rank of ``ep`` has its share of each; ranks of ``efsdp`` shard that share.
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
        """Whether a parameter is one of experts that are shared out."""
        return any(owner(name) == stack.path for stack in self.stacks)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a rank's share of a stack's parameter, before it is sharded."""
        return (shape[0] // self.ranks, *shape[1:])

    def sharded_dim(self, shape: tuple[int, ...]) -> int:
        """Along which dim a rank's share of a stack's parameter is sharded: by experts, or where they do not divide, inside them."""
        experts, *inner = self.local_shape(shape)
        return 1 if experts % self.shards and inner[0] % self.shards == 0 else 0

    def padded(self, shape: tuple[int, ...]) -> int:
        """Elements of a rank's share, filled up to a multiple of the shards, as FSDP2 sends it."""
        local = list(self.local_shape(shape))
        dim = self.sharded_dim(shape)
        local[dim] = -(-local[dim] // self.shards) * self.shards
        return math.prod(local)

    def placements(self, shape: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
        """(axis, "Shard(dim)" or "Replicate()") of a stack's parameter on the axes that are larger than 1."""
        places = {Axis.EFSDP.value: f"Shard({self.sharded_dim(shape)})", Axis.EP.value: "Shard(0)"}
        return tuple((axis, places.get(axis, "Replicate()")) for axis, size in self.mesh if size > 1 and axis != Axis.PP)

    def only(self, blocks: tuple[str, ...]) -> ExpertPlan | None:
        """Of these blocks; None where they have no experts."""
        stacks = tuple(stack for stack in self.stacks if any(is_within(stack.path, block) for block in blocks))
        return replace(self, stacks=stacks) if stacks else None


def without_experts(facts: ModelFacts, experts: ExpertPlan | None) -> ModelFacts:
    """Facts about what is not shared out by experts."""
    return facts if experts is None else replace(facts, parameters=tuple(p for p in facts.parameters if not experts.has(p.name)))


def expert_mesh_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    """The expert mesh of a resolved layout whose ``ep`` divides dp_shard * cp * tp."""
    sizes = {Axis.PP: layout.pp, Axis.DP_REPLICATE: layout.dp_replicate, Axis.EFSDP: sharing_ranks(layout) // layout.ep, Axis.EP: layout.ep}
    return tuple((axis.value, sizes[axis]) for axis in EXPERT_AXES)


def sharing_ranks(layout: Layout) -> int:
    """Ranks among which experts can be shared out."""
    return layout.dp_shard * layout.cp * layout.tp
