"""Gather whole tensors of all stages by name, copy them back into shards, and swap shards with a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.torch_private import local_part

from .shards import pieces
from .wholes import whole_everywhere


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
    missing: Sequence[str],
    unexpected: Sequence[str],
    *,
    strict: bool,
) -> None:
    """Copy whole tensors into shards, after all ranks have seen that names and shapes fit.

    Raises:
        ConfigError: they do not, on some rank.
    """
    agree.together(lambda: _check(tensors, state, missing, unexpected, strict=strict))
    for name, tensor in tensors:
        for piece in pieces(tensor) if name in state else ():
            piece.local.copy_(state[name][piece.slices])


def _check(
    tensors: Sequence[tuple[str, Tensor]],
    state: Mapping[str, Any],
    missing: Sequence[str],
    unexpected: Sequence[str],
    *,
    strict: bool,
) -> None:
    if strict and (missing or unexpected):
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
