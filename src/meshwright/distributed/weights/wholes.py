"""Gather whole tensors from shards, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info

from .shards import SHARDS, first_copies

PACK_ELEMENTS = 2**20
"""Number of elements of whole tensors after which a pack of shards is sent."""


def whole_on_first(tensors: Mapping[str, Tensor], *, differ: bool = False) -> dict[str, Tensor]:
    """Return copies of the whole tensors on the CPU of rank 0, and an empty dict on other ranks.

    Collective: the ranks of a tensor's mesh pass the same names. ``differ``: other ranks may pass other names.

    For small shards the number of collectives costs more than their bytes. So each rank writes its shards of many
    tensors into one buffer of zeros, and one all-reduce sums the buffers.
    """
    packed: dict[str, DTensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and _can_be_packed(tensor):
            packed[name] = tensor
        else:
            whole = whole_everywhere(tensor) if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().to("cpu", copy=True)
    for pack in _packs(packed):
        found |= _sum_of_parts(pack)
    found = {name: found[name] for name in tensors}
    if differ:
        return _on_first(found)
    return found if get_world_info()[0] == 0 else {}


def _on_first(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks, on rank 0."""
    names = agree.everybody_says(list(found))
    home = {name: rank for rank in reversed(range(len(names))) for name in names[rank]}
    rank = get_world_info()[0]
    mine = {name: found[name] for name, where in home.items() if where == rank}
    brought: list[Any] = [{}] * len(names)
    dist.gather_object(mine, brought if rank == 0 else None)
    return {name: tensor for named in brought for name, tensor in named.items()}


def whole_everywhere(tensor: DTensor) -> Tensor:
    """Return the whole tensor on every rank of its mesh, on the shards' device and without its graph.

    Collective over that mesh.
    """
    if not all(isinstance(placement, (*SHARDS, Replicate)) for placement in tensor.placements):
        return tensor.full_tensor().detach()
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if _is_first_replica(tensor):
        for piece in first_copies(tensor):
            whole[piece.slices] = piece.local
    mesh = tensor.device_mesh
    for axis in range(mesh.ndim if not tensor.is_meta else 0):
        dist.all_reduce(whole, group=mesh.get_group(axis))
    return whole


def _can_be_packed(tensor: DTensor) -> bool:
    """Return whether the mesh has all ranks, and only placements from which offsets in the whole can be computed."""
    is_everywhere = tensor.device_mesh.size() == dist.get_world_size()
    return is_everywhere and all(isinstance(placement, (*SHARDS, Replicate)) for placement in tensor.placements)


def _packs(tensors: Mapping[str, DTensor]) -> Iterator[dict[str, DTensor]]:
    """Group tensors of one dtype into packs of about PACK_ELEMENTS elements."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        pack: dict[str, DTensor] = {}
        for name, tensor in tensors.items():
            if tensor.dtype == dtype:
                pack[name] = tensor
                if sum(t.numel() for t in pack.values()) >= PACK_ELEMENTS:
                    yield pack
                    pack = {}
        if pack:
            yield pack


def _sum_of_parts(pack: Mapping[str, DTensor]) -> dict[str, Tensor]:
    like = next(iter(pack.values())).to_local()
    flat = torch.zeros(sum(tensor.numel() for tensor in pack.values()), dtype=like.dtype, device=like.device)
    pieces = flat.split([tensor.numel() for tensor in pack.values()])
    wholes = {name: piece.view(tensor.shape) for (name, tensor), piece in zip(pack.items(), pieces, strict=True)}
    for name, tensor in pack.items():
        if _is_first_replica(tensor):
            for piece in first_copies(tensor):
                wholes[name][piece.slices] = piece.local
    dist.all_reduce(flat)
    return {name: whole.to("cpu", copy=True) for name, whole in wholes.items()}


def _is_first_replica(tensor: DTensor) -> bool:
    where = tensor.device_mesh.get_coordinate() or ()
    return all(
        isinstance(placement, SHARDS) or not index for placement, index in zip(tensor.placements, where, strict=True)
    )
