"""Compute and clip one global gradient norm over plain tensors and DTensors on any mixture of meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.core.axes import Axis
from meshwright.core.devices import current_device, local_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.private_names import found, found_or_none
from meshwright.distributed.mesh import groups_of
from meshwright.distributed.pipeline.split import counted_once
from meshwright.distributed.pipeline.stage_module import PipelineStageModule
from meshwright.distributed.torch_private import local_part, spec_of
from meshwright.distributed.weights.shards import SHARDS, PartsShard, pieces
from meshwright.planning.plan import Plan

# --- step many tensors in one call of torch, whose functions for that are private


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute the 2-norm of each of many tensors, at once where torch can."""
    at_once = found_or_none("torch._foreach_norm")
    return tuple(map(torch.linalg.vector_norm, tensors) if at_once is None else at_once(tensors, 2))


def foreach_multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply many tensors in place, at once where torch can."""
    if (at_once := found_or_none("torch._foreach_mul_")) is not None:
        at_once(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], factor: float) -> None:
    """Add ``factor`` times other tensors in place, each to its own."""
    found("torch._foreach_add_")(tensors, others, alpha=factor)


def foreach_between(tensors: list[Tensor], others: list[Tensor], weight: float) -> list[Tensor]:
    """Return ``(1 - weight)`` times tensors plus ``weight`` times others."""
    return list(found("torch._foreach_lerp")(tensors, others, weight))


def foreach_between_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    """Move tensors in place towards others by ``weight`` of the way."""
    found("torch._foreach_lerp_")(tensors, others, weight)


def foreach_sign_(tensors: list[Tensor]) -> None:
    """Replace the elements of many tensors by their signs."""
    found("torch._foreach_sign_")(tensors)


def foreach_move_mean_of_squares_(means: list[Tensor], tensors: list[Tensor], decay: float) -> None:
    """Move means of squares in place, to ``decay`` of each and the rest of a square."""
    found("torch._foreach_mul_")(means, decay)
    found("torch._foreach_addcmul_")(means, tensors, tensors, 1 - decay)


def foreach_divided(tensors: list[Tensor], squares: list[Tensor], eps: float) -> list[Tensor]:
    """Return tensors divided by the roots of others plus ``eps``."""
    divisors = found("torch._foreach_sqrt")(squares)
    found("torch._foreach_add_")(divisors, eps)
    found("torch._foreach_reciprocal_")(divisors)
    found("torch._foreach_mul_")(divisors, tensors)
    return list(divisors)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of an optimizer's step returns, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# --- compute and clip one global gradient norm over plain tensors and DTensors on any mixture of meshes

EPSILON = 1e-6
"""Added to the norm before division, as in torch.nn.utils."""


class GradientPart(NamedTuple):
    """A view of this rank's gradients.

    Attributes:
        tensor: the view.
        groups: groups over which such parts are disjoint (sharded, not replicated).
        copies: number of ranks of those groups that hold this part.
    """

    tensor: Tensor
    groups: tuple[dist.ProcessGroup, ...] = ()
    copies: int = 1


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
    """List this rank's parts of all gradients; together they cover its gradients once.

    A ``Partial`` gradient (torch's SequenceParallel leaves those of norms so) is first summed in place.
    """
    found: list[GradientPart] = []
    seen: dict[tuple[int, tuple[int, ...]], tuple[dist.ProcessGroup, ...]] = {}  # by mesh and the dims that cut
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        if not isinstance(gradient, DTensor):
            found.append(GradientPart(gradient))
            continue
        mesh, cut, partial, in_parts = (spec := spec_of(gradient)).mesh, (), False, False
        for dim, place in enumerate(spec.placements):
            if type(place) in SHARDS:
                cut += (dim,)
                in_parts = in_parts or type(place) is PartsShard
            elif type(place) is not Replicate and isinstance(place, Partial):
                partial = True
        if partial:
            summed = [Replicate() if isinstance(place, Partial) else place for place in gradient.placements]
            gradient = parameter.grad = gradient.redistribute(placements=summed)
        key = (id(mesh), cut)
        if key not in seen:
            seen[key] = tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)
        if in_parts:
            here = [GradientPart(piece.local, seen[key], piece.copies) for piece in pieces(gradient)]
            found += here or [GradientPart(local_part(gradient), seen[key])]  # no rank may miss a collective
        else:
            found.append(GradientPart(local_part(gradient), seen[key]))
    return found


def total_norm(parts: list[GradientPart], over: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """Compute the 2-norm over all ranks' gradients as one vector: 0-dim, at least fp32, equal on every rank.

    Each part's sum of squares is reduced over exactly the groups that shard it, so replicas count once.

    Args:
        over: groups whose ranks have other parameters (pipeline stages).
    """
    by_groups: dict[tuple[tuple[dist.ProcessGroup, ...], int], list[Tensor]] = {}
    for part in parts:
        by_groups.setdefault((part.groups, part.copies), []).append(part.tensor)
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    wide = reduce(torch.promote_types, {part.tensor.dtype for part in parts}, torch.float32)
    for (groups, copies), tensors in by_groups.items():
        are_wide = {tensor.dtype for tensor in tensors} == {wide}
        norms = foreach_norm(tensors) if are_wide else [torch.linalg.vector_norm(t, dtype=wide) for t in tensors]
        square = torch.linalg.vector_norm(torch.stack(list(norms))).square() / copies
        squares[groups] = squares[groups] + square.to(squares[groups]) if groups in squares else square
    for groups in squares:
        for group in groups:
            squares[groups] = _summed(squares[groups], group)
    first, *others = squares.values() or [torch.zeros(())]
    norm = torch.stack([first, *(s.to(first) for s in others)]).sum().sqrt() if others else first.sqrt()
    if not over:
        return norm
    square = norm.double().square()
    for group in over:
        square = _summed(square, group)
    return square.sqrt()


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce a scalar, on the accelerator if the group has no CPU backend (offloaded gradients live on the CPU)."""
    has_cpu = any(backend.startswith("cpu:") for backend in dist.get_backend_config(group).split(","))
    summed = value if has_cpu or value.device.type != "cpu" else value.to(current_device(local_device()))
    dist.all_reduce(summed, group=group)
    return summed.to(value.device)


def scale_gradients(parts: list[GradientPart], factor: float | Tensor) -> None:
    """Multiply every gradient in place."""
    tensors = [part.tensor for part in parts]
    if tensors:
        foreach_multiply_(tensors, factor)


@contextmanager
def gradients_times(factor: float, parameters: Callable[[], Iterable[nn.Parameter]]) -> Iterator[None]:
    """Scale gradients by ``factor`` inside, those that exist already too, and back on leaving."""
    if factor == 1.0:
        yield
        return
    scale_gradients(local_gradients(parameters()), factor)
    try:
        yield
    finally:
        scale_gradients(local_gradients(parameters()), 1 / factor)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, foreach: bool = True, *, device_mesh: DeviceMesh | None = None
) -> Tensor:
    """Scale the model's gradients in place so that their global 2-norm is at most ``max_norm``.

    Args:
        model: what ``parallelize`` made; for a pipeline of one's own this rank's stage module, or an
            ``nn.ModuleList`` of them: the norm is over all ranks' stages.
        foreach: multiply all gradients in one call; False: one by one.
        device_mesh: has the pp axis of stage modules that ``build_pipeline_stage`` was not given yet.

    Returns:
        The norm before clipping: 0-dim, at least fp32, equal on every rank.

    Raises:
        ConfigError: stage modules with no ranks specified for them, or not all of this rank's.
    """
    if (pipeline := _PIPELINES.get(model)) is not None:
        plan, over = pipeline
        counted = counted_once(model.parts, plan)  # type: ignore[arg-type]
        return clip_gradients_(model.parameters(), max_norm, foreach, over=over, counted=counted)
    stages = [module for module in model.modules() if isinstance(module, PipelineStageModule)]
    if not stages or stages[0].num_stages == 1:
        return clip_gradients_(model.parameters(), max_norm, foreach)
    group = stages[0].pipeline_group  # the ranks that have the other stages
    if group is None:
        if not (groups := groups_of(device_mesh, Axis.PP)):
            raise ConfigError(
                f"this is stage {stages[0].stage_id} of {stages[0].num_stages}, and clip_grad_norm_ does not know"
                f" which ranks have the"
                f" others: give the stage to build_pipeline_stage first, or say device_mesh= (with a pp axis)"
            )
        (group,) = groups
    each = stages[0].num_stages // group.size()
    if len(stages) != each:
        raise ConfigError(
            f"this rank has {each} of the {stages[0].num_stages} stages, and clip_grad_norm_ was given {len(stages)}:"
            f" give all of this rank's at once, nn.ModuleList([...]), since the norm is one"
        )
    return clip_gradients_(model.parameters(), max_norm, foreach, over=[group])


def clip_gradients_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    foreach: bool = True,
    *,
    over: Sequence[dist.ProcessGroup] = (),
    counted: Iterable[nn.Parameter] | None = None,
) -> Tensor:
    """Scale the gradients of some parameters in place so that their 2-norm over all ranks is at most ``max_norm``.

    Returns the norm before clipping. ``over``: groups whose ranks have other parameters (pipeline stages).
    ``counted``: the parameters whose gradients make the norm, where others are copies of them.
    """
    parts = local_gradients(parameters)
    norm = total_norm(parts if counted is None else local_gradients(counted), over)
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    if foreach:
        scale_gradients(parts, factor)
    else:
        for part in parts:
            part.tensor.mul_(factor.to(part.tensor.device))
    return norm


_PIPELINES: WeakKeyDictionary[nn.Module, tuple[Plan, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Laid-out models with stages, and the groups whose ranks have the others."""


def are_of_stages(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters are those of a laid-out pipeline's stages, of which other ranks have others."""
    own = {id(p) for model in _PIPELINES for p in model.parameters()}
    return any(id(p) in own for p in parameters)


def norms_of_pipeline(model: nn.Module, plan: Plan, over: list[dist.ProcessGroup]) -> None:
    """Let ``clip_grad_norm_`` count all stages of a laid-out model, and torch's norm refuse the gradients of one."""
    _PIPELINES[model] = plan, over
    _watch_norms()


@cache
def _watch_norms() -> None:
    if (whole := found_or_none("torch.nn.utils.clip_grad._get_total_norm")) is None:
        return

    @wraps(whole)
    def norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        own = {id(p.grad) for model in _PIPELINES for p in model.parameters()}
        if any(id(tensor) in own for tensor in tensors):
            raise UnsupportedError(
                "torch's norm is of this rank's pipeline stage alone, and each stage would be clipped by another:"
                " use model.optimizer_step(optimizer, max_norm=…), or meshwright.distributed.clip_grad_norm_(model,"
                " max_norm) where the step is yours"
            )
        return whole(tensors, *args, **kwargs)

    torch.nn.utils.clip_grad._get_total_norm = torch.nn.utils.get_total_norm = norm  # type: ignore[assignment]
