"""Place a tensor of which a rank holds several runs of slices, or the same slices as another rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart, is_plain, ranges, take
from meshwright.distributed.torch_private import StridedShard, StridedShardOffsetMode
from meshwright.planning.tensor.plan import words_of_cut

from .parts_tensor import PartsTensor, gathered

NO_STRIDE = 2**31 - 1
"""torch infers an order of mesh axes from a strided shard's stride. This prime is not a product of mesh sizes."""


class _NoStride(int):
    """The stride of a placement that has none: it can be compared, but ``int`` of it raises UnsupportedError."""

    def __int__(self) -> int:
        raise UnsupportedError(CANNOT)


CANNOT = (
    "torch cannot deal out, or compute with, a weight that a rank holds several parts of (fused queries, keys and"
    " values; key heads that several ranks have). To write it: meshwright.load; pretrained weights from Hugging Face"
    " files; or tensor.copy_ of a whole tensor that distribute_tensor placed as Replicate() on every axis. To read it:"
    " full_tensor(), a full state dict, torch.distributed.checkpoint."
)


class PartsShard(StridedShard):
    """Sharded along ``dim``, each of its ``parts`` separately: a rank holds its shards of all parts, side by side.

    A strided shard is torch's nearest placement: torch does not treat it as a plain Shard, and calls its methods to
    split and gather a tensor. So torch's results are either correct or refused. A ``PartsTensor`` avoids most of the
    messages.
    """

    def __new__(cls, dim: int, parts: tuple[FusedPart, ...]) -> PartsShard:
        return super().__new__(cls, dim, split_factor=NO_STRIDE)

    def __init__(self, dim: int, parts: tuple[FusedPart, ...]):
        super().__init__(dim, split_factor=NO_STRIDE)
        self.parts = parts

    @property
    def split_factor(self) -> int:
        return _NoStride(NO_STRIDE)

    def __reduce__(self) -> tuple[Any, ...]:
        return PartsShard, (self.dim, self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartsShard) and (self.dim, self.parts) == (other.dim, other.parts)

    def __hash__(self) -> int:
        return hash((self.dim, self.parts))

    def __repr__(self) -> str:
        return words_of_cut(self.dim, self.parts)

    def __str__(self) -> str:
        return words_of_cut(self.dim, self.parts)

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """Return each rank's shard of a whole tensor, all of one size; torch splits and narrows tensors with it."""
        self._check(tensor.shape)
        shares = [take(tensor, self.dim, self.parts, rank, num_chunks) for rank in range(num_chunks)]
        return [share.contiguous() for share in shares] if contiguous else shares, [0] * num_chunks

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> Tensor:
        """Return the whole tensor on every rank of the axis. Collective."""
        self._check(current_logical_shape)
        shape = torch.Size(int(size) for size in current_logical_shape)
        return gathered(local_tensor, shape, self.dim, self.parts, mesh, mesh_dim)

    def local_shard_size_and_offset(
        self, curr_local_size: Any, num_chunks: int, rank: Any, offset_mode: int = 0
    ) -> tuple[int, Any]:
        """Return the size of a rank's shard and its offset in the whole, as torch asks for them.

        Raises UnsupportedError if an offset is asked for and the shard is not one run.
        """
        self._check([curr_local_size] * (self.dim + 1))
        runs = ranges(self.parts, rank, num_chunks)
        size = sum(high - low for low, high in runs)
        if offset_mode == StridedShardOffsetMode.NONE:
            return size, None
        if any(run[1] != after[0] for run, after in pairwise(runs)):
            raise UnsupportedError(CANNOT)
        return size, list(range(runs[0][0], runs[-1][1])) if offset_mode == StridedShardOffsetMode.ALL else runs[0][0]

    def _check(self, shape: Sequence[int]) -> None:
        if shape[self.dim] != sum(part.size for part in self.parts):  # another axis has cut the dim already
            raise UnsupportedError(CANNOT)


def placement_of_cut(dim: int, parts: tuple[FusedPart, ...], ranks: int) -> Placement:
    """Return torch's Shard if it gives every rank the same shard, else a PartsShard."""
    return Shard(dim) if is_plain(parts, ranks) else PartsShard(dim, parts)


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a full parameter as a DTensor over the one axis of ``mesh``, with a copy of this rank's shard.

    No communication; a parameter on meta stays on meta.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    local = parameter.detach()
    if not isinstance(placement, Replicate):
        whole = FusedPart(local.shape[placement.dim], local.shape[placement.dim])  # type: ignore[attr-defined]
        local = take(local, placement.dim, getattr(placement, "parts", (whole,)), rank, size)  # type: ignore[attr-defined]
    local = local.contiguous() if local.is_meta else local.clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=_stride(parameter.shape)
    )
    return PartsTensor.parameter_of(nn.Parameter(made, requires_grad=parameter.requires_grad))


def _stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
