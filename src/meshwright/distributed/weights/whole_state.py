"""Gather whole tensors of all stages by name, copy them back into shards, and swap shards with a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshwright.core.errors import ConfigError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.torch_private import local_part

from .shards import SHARDS, first_copies, pieces

# --- gather whole tensors from shards, many at a time

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


# --- gather whole tensors of all stages by name, copy them back into shards, and swap shards with a copy


class IncompatibleKeys(NamedTuple):
    """Names that a state dict lacks, and names that the model does not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def gathered(
    tensors: Sequence[tuple[str, Tensor]], stages: Sequence[dist.ProcessGroup], *, keep: bool
) -> dict[str, Tensor]:
    """Return whole copies on the CPU, of all pipeline stages (collective: one tensor after the other).

    Args:
        stages: the process group of the pipeline axis, if there is one.
        keep: on every rank; else on rank 0 alone.
    """
    is_kept, found = keep or get_world_info()[0] == 0, dict[str, Tensor]()
    own = dict(reversed(tensors))  # the first of two equal copies
    for name, owner, like in _everything(own, stages):
        if name in own and owner in (None, *(dist.get_rank(group) for group in stages)):
            tensor = own[name]
            whole = (whole_everywhere(tensor) if isinstance(tensor, DTensor) else tensor).detach()
        else:
            whole = torch.empty(like[0], dtype=like[1], device=next(iter(own.values())).device)
        if owner is not None:
            whole = whole.contiguous()
            dist.broadcast(whole, group=stages[0], group_src=owner)
        if is_kept:
            found[name] = whole.to("cpu", copy=True)
    return found


def _everything(
    own: Mapping[str, Tensor], stages: Sequence[dist.ProcessGroup]
) -> list[tuple[str, int | None, tuple[tuple[int, ...], torch.dtype]]]:
    """List name, rank on the pipeline axis (None without one), shape and dtype of each tensor of all stages."""
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(own.items())}
    if not stages:
        return [(name, None, like) for name, like in here.items()]
    brought: list[Any] = [None] * dist.get_world_size(stages[0])
    dist.all_gather_object(brought, here, group=stages[0])
    names = sorted({name for stage in brought for name in stage})
    owners = {name: next(rank for rank, stage in enumerate(brought) if name in stage) for name in names}
    return [(name, owners[name], brought[owners[name]][name]) for name in names]


def scatter(
    tensors: Sequence[tuple[str, Tensor]],
    state: Mapping[str, Any],
    names: Mapping[str, tuple[str, ...]],
    *,
    strict: bool,
) -> IncompatibleKeys:
    """Copy whole tensors into shards, after all ranks have seen that names and shapes fit.

    Args:
        names: the whole model's names, with the other names of each.

    Raises:
        ConfigError: they do not, on some rank.
    """
    known = {alias for name, aliases in names.items() for alias in (name, *aliases)}
    keys = IncompatibleKeys(
        [name for name, aliases in names.items() if not {name, *aliases} & set(state)],
        [name for name in state if name not in known],
    )
    given = {name: state[one] for name, more in names.items() for one in (*more, name) if one in state}
    agree.together(lambda: _check(tensors, given, *(keys if strict else ([], []))))
    for name, tensor in tensors:
        for piece in pieces(tensor) if name in given else ():
            piece.local.copy_(given[name][piece.slices])
    return keys


def _check(
    tensors: Sequence[tuple[str, Tensor]],
    state: Mapping[str, Any],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> None:
    if missing or unexpected:
        lacks = f"lacks {', '.join(missing[:3])} ({len(missing)} names)" if missing else ""
        knows = f"has {', '.join(unexpected[:3])} ({len(unexpected)} names), unknown to the model" if unexpected else ""
        raise ConfigError(
            f"the state dict {' and '.join(filter(None, (lacks, knows)))}: each rank gives all whole tensors under"
            f" global names, or strict=False"
        )
    for name, tensor in tensors:
        given = state.get(name)
        if given is not None and (not isinstance(given, Tensor) or isinstance(given, DTensor)):
            raise ConfigError(f"the state dict's {name} is a {type(given).__name__}; it must be a whole tensor")
        if given is not None and tuple(given.shape) != tuple(tensor.shape):
            raise ConfigError(
                f"the state dict's {name} has shape {tuple(given.shape)}, the model's {tuple(tensor.shape)}"
            )


def swap(tensors: Sequence[tuple[str, Tensor]], copies: Mapping[str, Tensor | None]) -> None:
    """Exchange the values of shards and of a copy of them, in place and without messages."""
    first: dict[str, Tensor] = {}
    for name, tensor in tensors:
        mine, copied = local_part(tensor.detach()), copies[name]
        assert copied is not None
        if name in first:  # the second stage's copy of a shared parameter
            mine.copy_(first[name])
            continue
        other = local_part(copied.detach())
        held, first[name] = mine.clone(), mine
        mine.copy_(other)
        other.copy_(held)
