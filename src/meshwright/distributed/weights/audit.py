"""Audit a laid-out model: every parameter exists and is placed as planned, and replicas are bitwise equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from meshwright.core.axes import Axis
from meshwright.core.dtypes import bytes_text, count_text
from meshwright.core.errors import IntegrityError
from meshwright.core.names import clean, pattern
from meshwright.core.record import changes_of
from meshwright.core.torch_private import compiled_call
from meshwright.distributed.float8 import config_of
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.recompute import OFFLOADED, RECOMPUTED
from meshwright.distributed.step.part import ModelPart
from meshwright.introspection.module_kinds import config_at
from meshwright.planning import layout
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.explain import columns
from meshwright.planning.plan import Plan
from meshwright.planning.values import NF4, NF4_STORED, stored_shape

from .constructed import Destinations
from .shards import SHARDS

FLATTENED = tuple(axis.value for axis in layout.SHARDS)
"""Axes that are one axis of the mesh over which fully_shard cuts."""


def placement_of(parameter: Tensor, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return (axis, "Shard(dim)" or "Replicate()") of a parameter, in a plan's notation.

    All mesh axes larger than 1 are listed, except the pipeline axis.
    """
    places, mesh = {}, plan.mesh
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        places = {
            axis: place
            for name, place in zip(names, parameter.placements, strict=True)
            for axis in (FLATTENED if name == "_".join(FLATTENED) else (name,))
        }
        if Axis.EP in names and plan.experts is not None:
            mesh = plan.experts.mesh

    def text(place: Any) -> str:
        if place is None or isinstance(place, Replicate):
            return "Replicate()"
        return str(place) if hasattr(place, "parts") or not isinstance(place, SHARDS) else f"Shard({place.dim})"

    return tuple((axis, text(places.get(axis))) for axis, size in mesh if size > 1 and axis != Axis.PP)


def describe(models: Sequence[nn.Module], plan: Plan) -> str:
    """Return a table of the parameters, and the techniques applied to each kind of module.

    A row holds parameters whose names differ only in the block: count, shape, dtype at rest, placement, device, bytes.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    destinations = Destinations(*models)
    for name, parameter in (named for model in models for named in model.named_parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        key = (
            pattern(clean(name)) + ("" if parameter.requires_grad else " (frozen)"),
            "×".join(map(str, destinations.shape_of(parameter))) or "scalar",
            NF4 if destinations.is_packed(parameter) else str(parameter.dtype).removeprefix("torch."),
            ", ".join(f"{axis}: {where}" for axis, where in placement_of(parameter, plan)) or "whole",
            str(local.device),
        )
        group = groups.setdefault(key, [0, 0, 0])
        sizes = 1, math.prod(destinations.shape_of(parameter)), local.numel() * local.element_size()
        group[:] = map(sum, zip(group, sizes, strict=True))
    rows = [
        (name, str(count), shape, dtype, place, device, bytes_text(size))
        for (name, shape, dtype, place, device), (count, _, size) in groups.items()
    ]
    total, here = (sum(group[i] for group in groups.values()) for i in (1, 2))
    mesh = " × ".join(f"{axis}={size}" for axis, size in plan.mesh if size > 1) or "one rank"
    p = plan.precision
    head = f"{plan.model}: {count_text(total)} parameters, {bytes_text(here)} of them on this rank"
    lines = [f"{head}; {plan.data.technique} over {mesh}; compute {p.compute}, reduce {p.reduce}"]
    lines.append(columns(rows, ("name", "count", "shape", "at rest", "placement", "device", "bytes here")))
    kinds: dict[str, Callable[[nn.Module], bool]] = {
        "sharded units": lambda module: isinstance(module, FSDPModule),
        "products in float8": lambda module: (config := config_at(module)) is not None and not config.emulate,
        "products in emulated float8": lambda module: (config := config_at(module)) is not None and config.emulate,
        "recomputed": lambda module: RECOMPUTED in changes_of(module),
        "activations in host memory": lambda module: OFFLOADED in changes_of(module),
        "compiled": lambda module: compiled_call(module) is not None,
    }
    every = [named for model in models for named in model.named_modules()]
    for what, is_one in kinds.items():
        if found := Counter(pattern(clean(name)) or "the root" for name, module in every if is_one(module)):
            lines.append(f"  {what}: {', '.join(f'{name} ({count})' for name, count in found.items())}")
    return "\n".join(lines)


def audit(
    parts: Sequence[ModelPart], data_groups: list[dist.ProcessGroup], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Compare each part with its facts and plan, and an optimizer with all; list problems in an IntegrityError.

    Collective over the data groups.
    """
    problems: list[str] = []
    trained: list[tuple[str, nn.Parameter]] = []
    for part in parts:
        found = {clean(name): parameter for name, parameter in part.model.named_parameters(remove_duplicate=False)}
        buffers = {clean(name): buffer for name, buffer in part.model.named_buffers(remove_duplicate=False)}
        trained += found.items()
        frozen, plan = set(part.plan.frozen), part.plan
        packed = plan.quantize.weights if plan.quantize is not None else ()
        # of one pattern, frozen layers may rest in 4 bits beside trained ones
        planned = {(p.pattern, p.shape, p.dtype == NF4): p for p in plan.parameters}
        for fact in part.facts.parameters:
            parameter = found.get(fact.name)
            if parameter is None:
                problems.append(f"{fact.name} is gone")
                continue
            is_packed = fact.name in packed
            names = ((name, fact.shape, is_packed) for name in (fact.name, pattern(fact.name)))
            request = next((planned[name] for name in names if name in planned), None)
            shape = stored_shape(fact.shape) if is_packed else fact.shape
            if tuple(parameter.shape) != shape:
                problems.append(f"{fact.name} has shape {tuple(parameter.shape)} instead of {shape}")
            if parameter.is_meta or (isinstance(parameter, DTensor) and parameter.to_local().is_meta):
                problems.append(f"{fact.name} was never given values")
            place = placement_of(parameter, plan)
            if request is not None and place != request.placements:
                problems.append(f"{fact.name} is placed {dict(place)}, and the plan says {dict(request.placements)}")
            dtype = request and (NF4_STORED if is_packed else request.dtype)
            if dtype is not None and str(parameter.dtype) != f"torch.{dtype}":
                is_in = str(parameter.dtype).removeprefix("torch.")
                problems.append(f"{fact.name} is kept in {is_in}, and the plan says {dtype}")
            if parameter.requires_grad == (fact.name in frozen):
                is_so = "trained" if parameter.requires_grad else "frozen"
                problems.append(f"{fact.name} is {is_so}, which is not what was planned")
            problems += [
                f"{alias} is no longer tied to {fact.name}"
                for alias in fact.aliases
                if found.get(alias) is not parameter
            ]
        for name in (fact.name for fact in part.facts.buffers):
            if name not in buffers:
                problems.append(f"the buffer {name} is gone")
            elif buffers[name].is_meta:
                problems.append(f"the buffer {name} was never given values")
        problems += [*_replicas(part.model, data_groups), *_float8(part.model, plan)]
    if optimizer is not None:
        held = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        known = {id(parameter): (name, parameter.requires_grad) for name, parameter in reversed(trained)}
        for key, (name, is_trained) in known.items():
            times = held.pop(key, 0)
            if is_trained and times != 1:
                problems.append(f"{name} is trained, and the optimizer holds it {times} times")
            elif times and not is_trained:
                problems.append(f"{name} is frozen, and the optimizer holds it")
        if held:
            problems.append(
                f"the optimizer holds {len(held)} tensors that are no parameters of the model (was it made before the"
                f" model was laid out?)"
            )
    _refuse("the model is not what the plan says", problems)


def refuse_unequal(model: nn.Module, groups: Sequence[dist.ProcessGroup], leaving: ExpertPlan | None = None) -> None:
    """Refuse ranks with unequal initial weights, but for ``leaving`` experts. Collective over the groups.

    Sharding unequal weights would combine several models into one, and no later audit could detect it.
    """
    if groups:
        _refuse("the ranks bring different models", list(_replicas(model, groups, brought=True, leaving=leaving)))


def _refuse(what: str, problems: list[str]) -> None:
    by_rank = agree.everybody_says(problems)
    merged = list(dict.fromkeys(problem for one in by_rank for problem in one))
    if merged:
        more = f" (and {len(merged) - 5} more)" if len(merged) > 5 else ""
        raise IntegrityError(f"{what}: " + "; ".join(merged[:5]) + more)


def _float8(model: nn.Module, plan: Plan):
    """Yield differences between the float8 products of the plan and of the model; none if the plan has no float8."""
    if plan.float8 is None:
        return
    planned, request = set(plan.float8.modules), config_of(plan.float8)
    for raw, module in model.named_modules():
        path, found = clean(raw), config_at(module)
        if path in planned and found is None:
            yield f"{path} computes in {plan.precision.compute}, and the plan says float8"
        elif path in planned and found != request:
            yield f"{path} computes in float8 otherwise than by the recipe {plan.float8.recipe}"
        elif path not in planned and found is not None:
            yield f"{path} computes in float8, and the plan says {plan.precision.compute}"
        planned.discard(path)
    yield from (f"{path} is gone, and the plan says float8" for path in sorted(planned))


def _replicas(
    model: nn.Module, groups: Sequence[dist.ProcessGroup], *, brought: bool = False, leaving: ExpertPlan | None = None
):
    """Yield parameters and buffers whose values differ between ranks that should hold the same ones.

    ``brought``: compare DTensors too over those of ``groups`` that are not in their mesh: another axis will shard them.
    """
    alike: dict[tuple[tuple[dist.ProcessGroup, ...], str], list[tuple[str, Tensor]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if leaving is not None and leaving.has(clean(name)):
            continue
        if isinstance(tensor, DTensor):
            axes = [tensor.device_mesh.get_group(i) for i in range(tensor.device_mesh.ndim)]
            placed = zip(axes, tensor.placements, strict=True)
            copied = [axis for axis, place in placed if place.is_replicate() and axis.size() > 1]
            others = [group for group in groups if brought and group not in axes]
            same, tensor = (*copied, *others), tensor.to_local()
        else:
            same = tuple(groups)
        # offloaded parameters and their buffers lie on different devices
        alike.setdefault((same, tensor.device.type), []).append((clean(name), tensor))
    for (same, _), tensors in alike.items():
        tensors = [(name, tensor) for name, tensor in tensors if not tensor.is_meta]
        if not same or not tensors:
            continue
        words = torch.stack([fingerprint(tensor) for _, tensor in tensors])
        equal = agree.equal_over(words, list(same))
        for (name, _), fine in zip(tensors, equal.tolist(), strict=True):
            if not fine:
                yield (
                    f"{name} differs between ranks that should hold the same values (build the model on meta, or"
                    f" seed every rank alike)"
                )


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor's bits, on its device: 0-dim int64, sensitive to the order of elements."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.detach().contiguous().flatten()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    chunk = 2**16 if flat.device.type == "cpu" else 2**20  # what a core's cache holds; what is worth a kernel's launch
    odd = torch.arange(min(chunk, flat.numel()), device=flat.device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E019
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for piece in flat.view(kind).split(chunk):
        total = total * 31 + (piece.to(torch.int64) * odd[: piece.numel()]).sum()
    return total
