"""Define a layout: the sizes of the mesh axes, and along which of them ranks hold other samples, tokens and weights.

Loss, norms, routing, FSDP's mesh, loaders, audits and the plan's messages read the axes here and nowhere else, so a new
axis is named once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.config.schema import is_unset, unset
from meshwright.core.errors import ConfigError

# --- define a layout


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; -1 means "what is left of the world".

    The world size is pp * dp_replicate * dp_shard * cp * tp. ``ep`` regroups data, context and tensor ranks for the
    experts and never multiplies the world.
    """

    pp: int = unset(1)
    """Pipeline stages."""
    dp_replicate: int = unset(1)
    """Data-parallel replicas: each holds whole (or sharded, see dp_shard) parameters and different samples."""
    dp_shard: int = unset(-1)
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP); they hold different samples."""
    cp: int = unset(1)
    """Context-parallel ranks: each holds a part of every sequence."""
    tp: int = unset(1)
    """Tensor-parallel ranks: each holds a part of every weight."""
    ep: int = unset(1)
    """Expert-parallel ranks: each holds a part of the experts; taken out of dp_shard, cp and tp."""

    def __post_init__(self) -> None:
        """Read sizes that are no whole numbers as a file's are: "auto" leaves one open, others raise ConfigError."""
        sizes = self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep
        if {*map(type, sizes)} - {int, type(Layout.pp)}:  # the default is marked as not set
            from meshwright.core.config import from_dict

            for name, value in vars(from_dict(type(self), vars(self), where="layout")).items():
                object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp_shard=2,dp_replicate=2"``.

        Raises:
            ConfigError: an unknown axis, one that occurs twice, or a size that is not a whole number.
        """
        from meshwright.core.config import from_dict

        sizes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            axis, _, size = item.partition("=")
            if axis.strip() in sizes:
                raise ConfigError(f"layout {text!r}: '{axis.strip()}' is given twice")
            try:
                sizes[axis.strip()] = int(size)
            except ValueError:
                raise ConfigError(
                    f"layout {text!r}: '{item}' is not 'axis=size' with a whole number, like dp_shard=2"
                ) from None
        return from_dict(cls, sizes, where="layout")

    def size(self, axis: Axis) -> int:
        """Return the size requested on ``axis``; -1: open."""
        return getattr(self, axis.value)

    @property
    def sizes(self) -> dict[str, int]:
        """The size requested on each axis; -1: open."""
        return {axis.value: self.size(axis) for axis in (*WORLD_AXES, Axis.EP)}

    @property
    def requested_schedule(self) -> str:
        """The pipeline schedule of the layout; "" unless a subclass has one: ``techniques`` names it."""
        return ""

    @property
    def is_open(self) -> bool:
        """Whether no size is stated."""
        return all(map(is_unset, self.sizes.values()))

    @property
    def is_resolved(self) -> bool:
        return all(self.size(axis) > 0 for axis in WORLD_AXES)

    @property
    def world(self) -> int:
        """Number of ranks. Raises ConfigError while a size is open."""
        if not self.is_resolved:
            raise ConfigError(f"layout {self} has an open size (-1); resolve it with a world size first")
        return math.prod(self.size(axis) for axis in WORLD_AXES)

    def resolve(self, world: int, *, ranks_per_node: int | None = None) -> Layout:
        """Fill the open size so that the product is ``world``.

        If both data axes are open, dp_shard takes the ranks of one node and dp_replicate the nodes (hybrid sharding);
        without ``ranks_per_node`` the whole world counts as one node.

        Raises:
            ConfigError: a size below 1 that is not -1, several open axes other than the two data axes, a world size
                that the fixed sizes do not divide, or an ``ep`` that does not divide the ranks that share experts.
        """
        for axis in (*WORLD_AXES, Axis.EP):
            if self.size(axis) < 1 and self.size(axis) != -1:
                raise ConfigError(
                    f"layout.{axis} = {self.size(axis)}: a mesh axis has size 1 or more, or -1 for what is left."
                )
        if self.ep == -1:
            raise ConfigError(
                "layout.ep = -1: expert parallelism does not fill the world; give it a size that divides dp_shard *"
                " cp * tp"
            )
        if world < 1:
            raise ConfigError(f"layout: a world of {world} processes cannot be laid out; it has 1 or more")
        open_axes = [axis for axis in WORLD_AXES if self.size(axis) == -1]
        fixed = math.prod(self.size(axis) for axis in WORLD_AXES if self.size(axis) > 0)
        if world % fixed or (not open_axes and world != fixed):
            larger = [axis for axis in WORLD_AXES if self.size(axis) > 1]
            product = f"{' * '.join(f'{axis}={self.size(axis)}' for axis in larger)} = {fixed}"
            if len(larger) < 2:
                product = f"{larger[0]} = {fixed}" if larger else "the product = 1"
            relation = "does not divide" if world % fixed else "is not"
            near = max(fixed, world // fixed * fixed)
            legal = f"a multiple of {fixed} processes, such as {near} or {near + fixed}"
            legal = legal if open_axes else f"{fixed} processes"
            if not open_axes and self.ep > 1 and fixed * self.ep == world:
                raise ConfigError(
                    f"layout: {product} and ep = {self.ep} for {world} processes: ep never multiplies the world, since"
                    f" experts are shared out among the ranks of dp_shard * cp * tp, which hold different tokens. Set"
                    f" layout.dp_shard = {self.dp_shard * self.ep}."
                )
            raise ConfigError(
                f"layout: {product} {relation} the world size {world}. Start {legal}, or change the layout"
                f" (layout.dp_shard = -1 takes what is left)."
            )
        left = world // fixed
        filled = {axis.value: left for axis in open_axes}
        if set(open_axes) == {Axis.DP_REPLICATE, Axis.DP_SHARD}:
            inner = self.cp * self.tp
            shard = math.gcd(left, max(1, (ranks_per_node or world) // inner))
            filled = {"dp_shard": shard, "dp_replicate": left // shard}
        elif len(open_axes) > 1:
            names = ", ".join(axis.value for axis in open_axes)
            raise ConfigError(
                f"layout: the sizes of {names} are all open (-1); at most one may be, or dp_replicate and dp_shard"
                f" together"
            )
        made = replace(self, **filled) if filled else self
        among = made.dp_shard * made.cp * made.tp
        if among % self.ep:
            legal = ", ".join(str(n) for n in range(1, among + 1) if among % n == 0)
            raise ConfigError(
                f"layout.ep = {self.ep} does not divide the {among} ranks of dp_shard * cp * tp, among which experts"
                f" are shared out; it never multiplies the world. Legal here: {legal}."
            )
        return made

    def __str__(self) -> str:
        sizes = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != 1)
        return sizes or "one process"


def data_layouts(max_world: int) -> Iterator[Layout]:
    """Yield every layout of the data axes on 2 to ``max_world`` ranks, smaller worlds first."""
    for world in range(2, max_world + 1):
        for replicas in range(1, world + 1):
            if world % replicas == 0:
                yield Layout(dp_replicate=replicas, dp_shard=world // replicas)


# --- define the mesh axes along which ranks hold other samples, tokens, parameters and experts

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

    def position(self, places: Mapping[Axis, int], axes: Iterable[Axis]) -> int:
        """Return the position, among the ranks along some axes as one axis, of a rank with these places on each."""
        position = 0
        for axis in axes:
            position = position * self.size(axis) + places[axis]
        return position

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


def sharded_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which fully_shard cuts a whole parameter: the first, or one inside the experts of a stack.

    The first dim is padded to a multiple of the shards, so that 8 experts on 64 ranks would take 8 times their bytes.
    """
    return int(len(shape) > 2 and shape[0] % shards > 0 and shape[1] % shards == 0)


def shares_of(layout: Layout, technique: str = "", *, replicates_tokens: bool = False) -> Shares:
    """Return the shares of a resolved layout, before it is known whether the tensor axis cuts sequences."""
    sizes = {axis.value: layout.size(axis) for axis in WORLD_AXES}
    return Shares(sizes, technique == "fully_shard", replicates_tokens=replicates_tokens)
