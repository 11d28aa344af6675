"""Which part of a parameter is here, and seeds that do not depend on where."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.comparison.sketch import sketch_part

from . import agree


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values (blake2b; equal on every machine)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and the global index of its first element."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    if local.numel() == 0:
        return local, (0,) * parameter.dim()
    assert tuple(local.shape) == tuple(shape)
    return local, tuple(offset)


def sketches(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sketch of each whole tensor, put together from the parts that ranks hold: (TENSOR_WIDTH,) float64 on the CPU.

    Collective over the groups that share a tensor out. Replicas are each sketched where they are.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            groups = tuple(mesh.get_group(i) for i, place in enumerate(tensor.placements) if place.is_shard() and mesh.size(i) > 1)
        local, offset = local_part(tensor.detach())
        by_groups.setdefault(groups, {})[name] = sketch_part(local, offset, tuple(tensor.shape))
    found: dict[str, Tensor] = {}
    for groups, parts in by_groups.items():
        found |= zip(parts, agree.total(torch.stack([*parts.values()]), list(groups)), strict=True)
    return {name: found[name] for name in tensors}
