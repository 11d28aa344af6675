"""Lay any transformer of transformers onto a mesh in one call: tensor parallelism, then FSDP2 or HSDP.

The names are those of NeMo AutoModel's parallelizer, as doors into the one engine. Gradients are averaged over data
ranks, since users of these functions bring mean losses; no second call completes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError
from meshwright.core.errors import import_classes_from_paths as import_classes_from_paths
from meshwright.distributed.mesh import NEMO_NAMES, axis_size, context_ranks, has_dp_mesh, known_mesh, sizes_of_stage
from meshwright.distributed.weights.shards import whole_everywhere
from meshwright.introspection.facts import model_facts
from meshwright.introspection.module_kinds import own_tensor_plan
from meshwright.planning.layout import SAMPLES
from meshwright.planning.techniques import Techniques

from .functions import averaging_plan, default_mp_policy, lay_out_module, mean_plan, rows_that_cut
from .styles import requested_of, translate_to_torch_parallel_style
from .zero import nvfsdp_strategy_parallelize as nvfsdp_strategy_parallelize

HAVE_NVFSDP = True
"""Whether ``nvfsdp_strategy_parallelize`` can be used: always, since its engine is this package's own."""

log = logging.getLogger("meshwright")
DOOR = "fsdp2_strategy_parallelize"


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: Mapping[str, str | ParallelStyle] | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Cut ``model`` in place over the mesh's ``tp`` axis, then shard it with FSDP2 (HSDP) over its data axes.

    Tensor parallelism includes sequence parallelism; embedding and head are cut over the vocabulary. The model takes
    whole batches, equal on all ranks of the axis, and returns whole logits. Every gradient, those of q and k norms
    too, is complete when backward ends, averaged over data ranks. Each repeated block is a unit; the last one keeps
    its parameters after forward. A model on meta stays there. The model is returned. Where the mesh has ``cp`` larger
    than 1, parameters are sharded over dp_shard × cp, and a loop cuts rows by ``context_parallel_rows``.

    Args:
        device_mesh: meshwright's axis names, or NeMo's data_parallel, context_parallel and tensor_parallel; axes of
            size 1 do nothing.
        mp_policy: dtypes; None means ``default_mp_policy()``: bfloat16, gradients reduced in fp32. It acts over a
            data axis of size 1 too, beside a tensor axis; on a mesh without either, and on one that has no data axis,
            the model's own dtype stays unless a policy is given.
        tp_shard_plan: module pattern (``*`` for an index) -> style, a name of transformers or a ParallelStyle; other
            modules stay whole. None: the measured cuts apply, whether or not the model has a plan of its own; where
            the two differ is logged.
        offload_policy: torch's CPUOffloadPolicy, or None.

    Raises:
        ConfigError: plan and model, or sizes and mesh, do not fit; the text names pattern, module and legal values.
        IntegrityError: ranks bring different weights. Build the model on meta, or under one seed on every rank.
        UnsupportedError: nothing can be cut, or the plan's results differ from those of one process.
    """
    device_mesh = known_mesh(device_mesh, NEMO_NAMES)
    sizes, offloads = sizes_of_stage(device_mesh), isinstance(offload_policy, CPUOffloadPolicy)
    requested = Techniques(tensor_plan=requested_of(tp_shard_plan, model), cpu_offload=offloads)
    if not offloads and offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise ConfigError(
            f"offload_policy is a {type(offload_policy).__name__}: legal are None and torch's CPUOffloadPolicy"
        )
    cuts, cuts_rows = axis_size(device_mesh, Axis.TP) > 1, rows_that_cut(model, device_mesh)
    # even of size 1: a call computes in one dtype on any number of ranks
    has_data_axis = any(axis.value in sizes for axis in SAMPLES)
    shards = has_dp_mesh(device_mesh) or context_ranks(device_mesh) > 1 or mp_policy is not None
    shards = shards or requested.cpu_offload or (cuts and has_data_axis)
    if tp_shard_plan and not cuts:
        words = "the mesh %s has no tp axis larger than 1, so tp_shard_plan has nothing to do"
        log.info(f"{DOOR}: {words}", sizes)
    if not cuts and not shards:
        log.info(f"{DOOR}: the mesh %s has no axis larger than 1, so there is nothing to do", sizes)
        return model
    facts = model_facts(model)
    if shards:
        plan = averaging_plan(facts, device_mesh, mp_policy or default_mp_policy(), requested, cuts=True)
    else:
        plan = mean_plan(facts, device_mesh, requested)
    if isinstance(offload_policy, CPUOffloadPolicy):
        plan = replace(plan, data=replace(plan.data, pin_memory=plan.data.pin_memory and offload_policy.pin_memory))
    if plan.tensor is not None:
        log.info(f"{DOOR}: the plan is %s", plan.tensor.source)
    rows = ("tensor_parallel", *cuts_rows, "fully_shard")
    return lay_out_module(model, facts, plan, device_mesh, rows, door=DOOR)


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of a transformers model, module pattern -> style, by the names of ``model``.

    It comes from ``_tp_plan`` of the model and its submodules and from ``base_model_tp_plan`` of their configs, with
    a tied head or embedding; patterns that match nothing in this model are left out.

    Raises:
        ConfigError (a ValueError): the model brings no plan.
    """
    plan = own_tensor_plan(model)
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} brings no tensor-parallel plan along (neither _tp_plan nor"
            f" config.base_model_tp_plan). None is needed: leave tp_shard_plan = None, and how it can be cut is"
            f" measured"
        )
    return {pattern: translate_to_torch_parallel_style(style) for pattern, style in plan.items()}


def to_cpu(v: Any) -> Any:
    """Copy a tensor to the CPU, a DTensor whole (all ranks of its mesh call this); return other values as they are.

    Raises:
        ConfigError (a ValueError): a DTensor on meta, which has no values.
    """
    if isinstance(v, DTensor):
        if v.is_meta:
            raise ConfigError("to_cpu: the DTensor is on meta, where it has no values. Materialise it first")
        return whole_everywhere(v).cpu()
    return v.cpu() if isinstance(v, Tensor) else v
