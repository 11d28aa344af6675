"""Define a region of a block, and the cuts of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart

from .adapters import Adapted


@dataclass(frozen=True)
class Cut:
    """The division of a tensor into groups.

    Attributes:
        name: parameter or buffer, by its path within the block.
        dim: the dim that is cut.
        parts: the parts along it, in order (queries, keys and values that are blocked in one weight are three).
    """

    name: str
    dim: int
    parts: tuple[FusedPart, ...]


@dataclass(frozen=True)
class Region:
    """Column-parallel layers, the modules between, and the row-parallel layer that ends the region.

    Attributes:
        kind: "attention" mixes tokens, a "feed_forward" does not.
        container: path of the smallest module around the region ("" is the block itself).
        producers: linear layers that are cut by their output features.
        consumer: the linear layer that ends the region.
        groups: number of groups of the consumer's input features (query heads; hidden features).
        cuts: cuts of the producers' weights and biases, the consumer's weight, and other tensors of single groups.
        shared: other parameters inside, which all groups use.
        spanning: norms between a producer and the rest that run over all its features.
        roles: (linear layer, role) of each: query, key, value, gate, up, several joined by +, and output or down.
        adapted: linear layers with adapters. Before the region's end, an adapter's first layer is whole, its second
            cut as its host; at the end, the first is cut, the second whole, and one partial sum has the bias.
        latent: linear layers before producers that every rank computes whole, since all groups use their outputs:
            the compressed queries, keys and values of multi-head latent attention (arXiv 2405.04434).
        fed: producers whose inputs derive from latent layers alone, not from outside.
    """

    kind: Literal["attention", "feed_forward"]
    container: str
    producers: tuple[str, ...]
    consumer: str
    groups: int
    cuts: tuple[Cut, ...]
    shared: tuple[str, ...] = ()
    spanning: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    adapted: tuple[Adapted, ...] = ()
    latent: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Linear layers that take input from outside the region."""
        return (*(path for path in self.producers if path not in self.fed), *self.latent)

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of the region but those of adapters."""
        return (*self.latent, *self.producers, self.consumer)

    def adapters_of(self, host: str) -> Adapted | None:
        return next((found for found in self.adapted if found.host == host), None)

    def place_of(self, host: str) -> str:
        """Return the module that stands where the linear layer would without adapters."""
        found = self.adapters_of(host)
        return host if found is None else found.around

    def linears_of(self, host: str) -> tuple[str, ...]:
        """Return a linear layer and those of its adapters."""
        found = self.adapters_of(host)
        return (host, *found.linears) if found is not None else (host,)

    @property
    def joint(self) -> int:
        """The number of groups of the part with the fewest; up to as many ranks hold no copies."""
        return min(part.groups for cut in self.cuts for part in cut.parts)

    def fits(self, ranks: int) -> bool:
        """Return whether ``ranks`` ranks can share the region."""
        return self.groups % ranks == 0 and all(part.fits(ranks) for cut in self.cuts for part in cut.parts)

    def cut_of(self, name: str) -> Cut | None:
        return next((cut for cut in self.cuts if cut.name == name), None)


def shapes_of(block: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a block's parameters and buffers."""
    return {name: tensor.shape for name, tensor in (*block.named_parameters(), *block.named_buffers())}


def resized(region: Region, before: dict[str, torch.Size], after: dict[str, torch.Size], heads: Fraction) -> Region:
    """Transfer a region to a block of the same structure and other sizes.

    Args:
        before, after: shapes in the region's own block, and in the other.
        heads: ratio of the other block's number of heads to this one's.

    Raises:
        UnsupportedError: the region's sizes do not follow.
    """
    cuts = tuple(_resized(cut, region.kind, before, after, heads) for cut in region.cuts)
    found = replace(region, cuts=cuts)
    growth = _width(_end(found)) / _width(_end(region))
    for old, new in zip(region.cuts, found.cuts, strict=True):
        # a tensor with a few numbers for each head does not grow with the size of heads
        legal = (growth, 1) if len(old.parts) == 1 else (growth,)
        for before_part, after_part in zip(old.parts, new.parts, strict=True):
            if (found_growth := _width(after_part) / _width(before_part)) not in legal:
                raise UnsupportedError(
                    f"{old.name} in the layers of {region.container} has {float(found_growth):g} times as many slices"
                    f" in a group as in a small model of the same structure, and the layer behind it {float(growth):g}"
                    f" times: how it is cut does not follow"
                )
    return replace(found, groups=_end(found).groups)


def _end(region: Region) -> FusedPart:
    cut = region.cut_of(f"{region.consumer}.weight")
    assert cut is not None
    return cut.parts[0]


def _width(part: FusedPart) -> Fraction:
    """Return the number of slices in a group."""
    return Fraction(part.size, part.groups)


def _resized(cut: Cut, kind: str, before: dict[str, torch.Size], after: dict[str, torch.Size], heads: Fraction) -> Cut:
    old, new = before[cut.name][cut.dim], after[cut.name][cut.dim]
    parts = []
    for part in cut.parts:
        size = Fraction(part.size * new, old)
        groups = part.groups * heads if kind == "attention" else size * part.groups / part.size
        if size.denominator > 1 or groups.denominator > 1 or size % groups:
            raise UnsupportedError(
                f"{cut.name} has {new} slices where a model of the same structure has {old}, of which {part.size} fall"
                f" into {part.groups} groups: how it is cut does not follow from that"
            )
        parts.append(FusedPart(int(size), int(groups)))
    return replace(cut, parts=tuple(parts))


def labels_of(groups: list[list[int]], size: int) -> list[int | None]:
    """Return the number of each column's group; None for columns in no group."""
    labels: list[int | None] = [None] * size
    for number, group in enumerate(groups):
        for column in group:
            labels[column] = number
    return labels


def parts_of(labels: Sequence[int | None], groups: int) -> tuple[FusedPart, ...] | None:
    """Return the parts of a sequence of group numbers, each part being 0 … 0 1 … 1 2 … in equal shares.

    None where it is no such sequence.
    """
    parts: list[FusedPart] = []
    start = 0
    while start < len(labels):
        width = next((i for i, label in enumerate(labels[start:]) if label != 0), len(labels) - start)
        part = [number for number in range(groups) for _ in range(width)]
        if not width or list(labels[start : start + len(part)]) != part:
            return None
        parts.append(FusedPart(len(part), groups))
        start += len(part)
    return tuple(parts)
