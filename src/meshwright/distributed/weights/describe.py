"""Describe a laid-out model by its tensors and modules, not by its plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from meshwright.core.axes import Axis
from meshwright.core.names import clean, pattern
from meshwright.core.record import changes_of
from meshwright.core.torch_private import compiled_call
from meshwright.core.units import bytes_text, count_text
from meshwright.distributed.recompute.host_activations import OFFLOADED
from meshwright.distributed.recompute.recompute import RECOMPUTED
from meshwright.introspection.module_kinds import config_at
from meshwright.planning import shares
from meshwright.planning.explain import columns
from meshwright.planning.plan import Plan
from meshwright.planning.quantize.format import NF4

from .destinations import Destinations
from .shards import SHARDS

FLATTENED = tuple(axis.value for axis in shares.SHARDS)
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
    return tuple((axis, _words(places.get(axis, Replicate()))) for axis, size in mesh if size > 1 and axis != Axis.PP)


def _words(place: Any) -> str:
    if isinstance(place, Replicate):
        return "Replicate()"
    return str(place) if hasattr(place, "parts") or not isinstance(place, SHARDS) else f"Shard({place.dim})"


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
        for i, more in enumerate(
            (1, math.prod(destinations.shape_of(parameter)), local.numel() * local.element_size())
        ):
            group[i] += more
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
    return "\n".join([*lines, *(f"  {what}: {', '.join(names)}" for what, names in _applied(models) if names)])


def _applied(models: Sequence[nn.Module]) -> Iterator[tuple[str, list[str]]]:
    """Yield each technique with the modules it was applied to, as name patterns and their counts."""
    kinds: dict[str, Callable[[nn.Module], bool]] = {
        "sharded units": lambda module: isinstance(module, FSDPModule),
        "products in float8": lambda module: (config := config_at(module)) is not None and not config.emulate,
        "products in emulated float8": lambda module: (config := config_at(module)) is not None and config.emulate,
        "recomputed": lambda module: RECOMPUTED in changes_of(module),
        "activations in host memory": lambda module: OFFLOADED in changes_of(module),
        "compiled": lambda module: compiled_call(module) is not None,
    }
    for what, is_one in kinds.items():
        found = Counter(
            pattern(clean(name)) or "the root"
            for model in models
            for name, module in model.named_modules()
            if is_one(module)
        )
        yield what, [f"{name} ({count})" for name, count in found.items()]
