"""Define the placement of a tensor of which a rank holds several runs of slices, or the same slices as another rank."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Placement, Shard

from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart, is_plain
from meshwright.planning.tensor.plan import words_of_cut

from .torch_2_11 import may_hash

CANNOT = (
    "torch cannot deal out, or compute with, a weight that a rank holds several parts of (fused queries, keys and"
    " values; key heads that several ranks have). To write it: meshwright.load; pretrained weights from Hugging Face"
    " files; or tensor.copy_ of a whole tensor that distribute_tensor placed as Replicate() on every axis. To read it:"
    " full_tensor(), a full state dict, torch.distributed.checkpoint."
)


class PartsShard(Placement):
    """Sharded along ``dim``, each of its ``parts`` separately: a rank holds its shards of all parts, side by side.

    None of torch's placements describes this, so the placement is none of them. A ``PartsTensor`` answers all operators
    itself. Wherever torch would derive other placements from this one, it looks them up by their hash first: there is
    none, and so nothing is computed as if the tensor were not sharded.
    """

    def __init__(self, dim: int, parts: tuple[FusedPart, ...]):
        super().__init__()
        self.dim, self.parts = dim, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return PartsShard, (self.dim, self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartsShard) and (self.dim, self.parts) == (other.dim, other.parts)

    def __hash__(self) -> int:
        if may_hash():
            return hash((self.dim, self.parts))
        raise UnsupportedError(CANNOT)

    def __repr__(self) -> str:
        return words_of_cut(self.dim, self.parts)

    def __str__(self) -> str:
        return words_of_cut(self.dim, self.parts)


def placement_of_cut(dim: int, parts: tuple[FusedPart, ...], ranks: int) -> Placement:
    """Return torch's Shard if it gives every rank the same shard, else a PartsShard."""
    return Shard(dim) if is_plain(parts, ranks) else PartsShard(dim, parts)
