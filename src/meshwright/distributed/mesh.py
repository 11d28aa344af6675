"""Build the device mesh, one axis per name, outermost first, sizes of 1 included, and return its parts by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.process.absent_peers import peers_are_absent
from meshwright.distributed.torch_private import flattened
from meshwright.planning.experts import expert_mesh_of
from meshwright.planning.layout import BATCH, SAMPLES, SHARDS, Layout, Shares

BUILT: dict[tuple[ProcessGroup | None, Layout, str], DeviceMesh] = {}
"""The meshes of the present process group of all ranks: torch frees no group before its end, each with threads."""


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Build the mesh of a resolved layout with all its groups, once in a process group of ``layout.world`` ranks."""
    if peers_are_absent():
        return _new_mesh(layout, device_type)
    key = dist.group.WORLD, layout, device_type
    if key not in BUILT:
        for stale in [made for made in BUILT if made[0] is not key[0]]:
            del BUILT[stale]
        BUILT[key] = _new_mesh(layout, device_type)
    return BUILT[key]


def _new_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    shape = tuple(layout.size(axis) for axis in WORLD_AXES)
    mesh: Any = init_device_mesh(device_type, shape, mesh_dim_names=tuple(axis.value for axis in WORLD_AXES))
    if layout.ep > 1:
        sizes = dict(expert_mesh_of(layout))
        mesh._meshwright_experts = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh


def get_expert_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the same ranks' mesh for experts (pp, dp_replicate, efsdp, ep) of a layout with ep > 1; else None."""
    return getattr(device_mesh, "_meshwright_experts", None)


def axis_sizes(device_mesh: DeviceMesh | None) -> dict[str, int]:
    """Map axis names to sizes; empty without a mesh."""
    if device_mesh is None:
        return {}
    names = device_mesh.mesh_dim_names or ()
    return dict(zip(names, device_mesh.shape, strict=False))


def axis_size(device_mesh: DeviceMesh | None, axis: Axis) -> int:
    """Return the size of an axis, of ep if the mesh was built for it; 1 for one that the mesh lacks."""
    return plan_sizes(device_mesh).get(axis.value, 1)


OTHER_NAMES = {
    "data_parallel": Axis.DP_SHARD,
    "dp": Axis.DP_SHARD,
    "fsdp": Axis.DP_SHARD,
    "tensor_parallel": Axis.TP,
    "tensor": Axis.TP,
    "pipeline_parallel": Axis.PP,
    "pipeline": Axis.PP,
    "context_parallel": Axis.CP,
}
"""Names of axes in other systems."""
NEMO_NAMES = ("data_parallel", "context_parallel", "tensor_parallel")


def known_mesh(device_mesh: DeviceMesh, understands: tuple[str, ...] = (), *, cuts_rows: bool = False) -> DeviceMesh:
    """Return a mesh after a check that its axes are known.

    Args:
        understands: other names to translate: the result is another mesh, of the same ranks by meshwright's names.
        cuts_rows: the caller cuts rows in all stages of a pipeline; others leave the step to their users' own loops.

    Raises:
        ConfigError: an axis with another name, or without one; the text lists the legal ones.
        UnsupportedError: rows would have to be cut in the stages of a pipeline.
    """
    names = device_mesh.mesh_dim_names or ()
    legal = [axis.value for axis in WORLD_AXES]
    if not names:
        raise ConfigError(
            f"the mesh of shape {tuple(device_mesh.shape)} has no axis names: give mesh_dim_names=, of"
            f" {', '.join(legal)}"
        )
    strange = [name for name in names if name not in legal and name not in understands]
    if strange:
        hints = [f"{name} is {OTHER_NAMES[name].value} here" for name in strange if name in OTHER_NAMES]
        hint = f" ({'; '.join(hints)})" if hints else ""
        raise ConfigError(f"the mesh has the axes {sorted(strange)}; legal names are {', '.join(legal)}{hint}")
    if any(name in understands for name in names):
        given: Any = device_mesh
        device_mesh = getattr(given, "_meshwright_renamed", None)  # type: ignore[assignment]
        if device_mesh is None:
            ours = tuple(OTHER_NAMES[name].value if name in understands else name for name in names)
            if given.mesh.numel() != dist.get_world_size():
                raise ConfigError(f"the axes {names} are of a part of the ranks: name them as ours, {', '.join(ours)}")
            device_mesh = given._meshwright_renamed = DeviceMesh(given.device_type, given.mesh, mesh_dim_names=ours)
    if not cuts_rows:
        refuse_rows_of_stages(device_mesh)
    return device_mesh


def refuse_rows_of_stages(device_mesh: DeviceMesh) -> None:
    """Raise UnsupportedError for a mesh with both a pipeline and a context axis, where a user's loop runs the step."""
    ranks, stages = context_ranks(device_mesh), get_pp_size(device_mesh)
    if ranks > 1 and stages > 1:
        raise UnsupportedError(
            f"the mesh has cp = {ranks} beside pp = {stages}, and this function leaves the step to your own loop:"
            f" stages behind the first would not know which tokens they have. Use parallelize(), or make the mesh"
            f" with cp = 1."
        )


def context_ranks(device_mesh: DeviceMesh | None) -> int:
    """Return the number of ranks over which rows are cut; 1 without a cp axis."""
    return axis_size(device_mesh, Axis.CP)


def can_merge_data(device_mesh: DeviceMesh) -> bool:
    """Return whether ``with_data_on`` can change a mesh: it has all ranks, and was not built for experts."""
    return get_expert_mesh(device_mesh) is None and device_mesh.mesh.numel() == dist.get_world_size()


def with_data_on(device_mesh: DeviceMesh, axis: Axis) -> DeviceMesh:
    """Make a mesh of the same ranks with all data ranks on one data axis, and one on the other (collective)."""
    sizes = axis_sizes(device_mesh)
    names = list(sizes)
    ordered = [each.value for each in WORLD_AXES if each.value in sizes]  # the data axes are neighbours
    ranks = device_mesh.mesh.permute([names.index(name) for name in ordered])
    merged = {each.value: -1 if each is axis else 1 for each in SAMPLES}
    whole = [each.value for each in WORLD_AXES if each.value in sizes or each in SAMPLES]
    shape = [merged.get(name, sizes.get(name, 1)) for name in whole]
    return DeviceMesh(device_mesh.device_type, ranks.reshape(shape), mesh_dim_names=tuple(whole))


def plan_sizes(device_mesh: DeviceMesh | None) -> dict[str, int]:
    """Map axis names to sizes for a plan, with ep if the mesh was built for it."""
    experts = get_expert_mesh(device_mesh)
    return axis_sizes(device_mesh) | ({} if experts is None else {Axis.EP.value: experts[Axis.EP.value].size()})


def sizes_of_stage(device_mesh: DeviceMesh | None) -> dict[str, int]:
    """Map axis names to sizes for functions on the module of one stage: without the pipeline's axis."""
    return {name: size for name, size in plan_sizes(device_mesh).items() if name != Axis.PP.value}


def has_dp_mesh(device_mesh: DeviceMesh | None) -> bool:
    """Return whether ranks with different samples exist: a data axis larger than 1."""
    return any(axis_size(device_mesh, axis) > 1 for axis in SAMPLES)


def get_dp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the data axes larger than 1: 2-D (dp_replicate, dp_shard), or one; raise ValueError without any."""
    large = [axis.value for axis in SAMPLES if _is_large(device_mesh, axis)]
    if not large:
        sizes = ", ".join(f"{name} = {size}" for name, size in axis_sizes(device_mesh).items())
        raise ValueError(
            f"the mesh ({sizes}) has no data axis (dp_replicate, dp_shard) larger than 1; ask has_dp_mesh first"
        )
    return device_mesh[tuple(large)] if len(large) > 1 else device_mesh[large[0]]


def replica_axis(device_mesh: DeviceMesh, shares: Shares) -> DeviceMesh | None:
    """Return the axes along which dense parameters are replicated, as one; None if none is larger than 1."""
    return _as_one(device_mesh, shares.replica_axes)


def get_fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the sharding axes of dense parameters, dp_shard flattened with cp, if larger than 1; else None."""
    return sharding_axis(device_mesh) if any(_is_large(device_mesh, axis) for axis in SHARDS) else None


def sharding_axis(device_mesh: DeviceMesh, axes: tuple[Axis, ...] = SHARDS) -> DeviceMesh | None:
    """Return the sharding axis of any size, several as one; None if the mesh has none of that name."""
    if (found := _as_one(device_mesh, axes)) is not None:
        return found
    return device_mesh[Axis.DP_SHARD.value] if Axis.DP_SHARD.value in axis_sizes(device_mesh) else None


def _as_one(device_mesh: DeviceMesh, axes: Iterable[Axis]) -> DeviceMesh | None:
    large = [axis.value for axis in axes if _is_large(device_mesh, axis)]
    if len(large) > 1:
        return flattened(device_mesh[tuple(large)], "_".join(large))
    return device_mesh[large[0]] if large else None


def _one_axis(device_mesh: DeviceMesh, axis: Axis) -> DeviceMesh | None:
    return device_mesh[axis.value] if _is_large(device_mesh, axis) else None


def _is_large(device_mesh: DeviceMesh, axis: Axis) -> bool:
    """Return whether the mesh has the axis, larger than 1; raise ConfigError for another system's name in its place."""
    sizes = axis_sizes(device_mesh)
    other = next((name for name in sizes if OTHER_NAMES.get(name) == axis), None)
    if axis.value not in sizes and other is not None:
        raise ConfigError(f"the mesh has the axes {sorted(sizes)}: {other} is {axis.value} here; name it so")
    return sizes.get(axis.value, 1) > 1


def get_tp_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the tensor-parallel axis, or None if the mesh has none larger than 1."""
    return _one_axis(device_mesh, Axis.TP)


def get_pp_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the pipeline axis, or None if the mesh has none larger than 1."""
    return _one_axis(device_mesh, Axis.PP)


def get_cp_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the context-parallel axis, or None if the mesh has none larger than 1."""
    return _one_axis(device_mesh, Axis.CP)


def get_ep_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the expert-parallel axis, or None if the mesh has none larger than 1 and no layout with ep > 1."""
    experts = get_expert_mesh(device_mesh)
    return experts[Axis.EP.value] if experts is not None else _one_axis(device_mesh, Axis.EP)


def get_pp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return this process's pipeline stage; 0 without a pp axis."""
    return device_mesh.get_local_rank(Axis.PP.value) if Axis.PP.value in axis_sizes(device_mesh) else 0  # type: ignore[union-attr]


def get_pp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of pipeline stages; 1 without a pp axis."""
    return axis_size(device_mesh, Axis.PP)


def groups_of(device_mesh: DeviceMesh | None, *axes: Axis) -> list[ProcessGroup]:
    """List the process groups of those axes that are larger than 1, in the order given."""
    large = [axis.value for axis in axes if axis_size(device_mesh, axis) > 1]
    return [device_mesh.get_group(name) for name in large] if device_mesh is not None else []


def data_groups(device_mesh: DeviceMesh | None) -> list[ProcessGroup]:
    """List the process groups, larger than 1, of ranks with other tokens of the batch, replicas first."""
    return groups_of(device_mesh, *BATCH)


def is_first_of_stage(device_mesh: DeviceMesh) -> bool:
    """Return whether this process is the first of those with its rank on the pipeline axis."""
    return all(device_mesh.get_local_rank(name) == 0 for name in axis_sizes(device_mesh) if name != Axis.PP.value)


def data_position(device_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (rank, size) of this process among those that hold different samples, replicas outermost."""
    rank, size = 0, 1
    sizes = axis_sizes(device_mesh)
    for name in (axis.value for axis in SAMPLES if device_mesh is not None and axis.value in sizes):
        rank, size = rank * sizes[name] + device_mesh.get_local_rank(name), size * sizes[name]  # type: ignore[union-attr]
    return rank, size


def tensor_position(device_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (rank, size) of this process among those that cut the same layers; (0, 1) without such an axis."""
    axis = None if device_mesh is None else get_tp_mesh(device_mesh)
    return (0, 1) if axis is None else (axis.get_local_rank(), axis.size())
