"""One global gradient norm over plain tensors and DTensors on any mixture of meshes, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils does."""


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]]:
    """This rank's part of every gradient, with the groups over which the parts are disjoint (sharded, not replicated)."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            groups = tuple(mesh.get_group(i) for i, place in enumerate(gradient.placements) if place.is_shard() and mesh.size(i) > 1)
            found.append((gradient._local_tensor, groups))
        else:
            found.append((gradient, ()))
    return found


def total_norm(parts: list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]]) -> Tensor:
    """The 2-norm over all ranks' gradients as one vector: 0-dim, at least fp32, equal on every rank.

    Each part's sum of squares is reduced over exactly the groups that shard it, so replicas count once.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for tensor, groups in parts:
        by_groups.setdefault(groups, []).append(tensor)
    if not by_groups:
        return torch.zeros(())
    squares = []
    for groups, tensors in by_groups.items():
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        norms = torch._foreach_norm(tensors, 2) if wide == tensors[0].dtype else [torch.linalg.vector_norm(t, dtype=wide) for t in tensors]
        square = torch.linalg.vector_norm(torch.stack(list(norms))).square()
        for group in groups:
            square = _summed(square, group)
        squares.append(square)
    return torch.stack([s.to(squares[0]) for s in squares]).sum().sqrt() if len(squares) > 1 else squares[0].sqrt()


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce a scalar, on the accelerator where the group knows no CPU back end (offloaded gradients live on the CPU)."""
    if value.device.type == "cpu" and "cpu" not in {device.type for device in group._device_types}:
        moved = value.cuda()
        dist.all_reduce(moved, group=group)
        return moved.cpu()
    dist.all_reduce(value, group=group)
    return value


def scale_gradients(parts: list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]], factor: float | Tensor) -> None:
    """Multiply every gradient in place."""
    tensors = [tensor for tensor, _ in parts]
    if tensors:
        torch._foreach_mul_(tensors, factor)


def clip_grad_norm_(model: nn.Module, max_norm: float, foreach: bool = True) -> Tensor:
    """Scale the model's gradients in place so that their global 2-norm is at most ``max_norm``.

    Args:
        foreach: multiply all gradients in one call; False: one by one.

    Returns:
        The norm before clipping: 0-dim, at least fp32, equal on every rank.
    """
    parts = local_gradients(model.parameters())
    norm = total_norm(parts)
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    if foreach:
        scale_gradients(parts, factor)
    else:
        for tensor, _ in parts:
            tensor.mul_(factor.to(tensor.device))
    return norm
