"""Lay any transformer of transformers onto a mesh in one call: NeMo AutoModel's path and names, as doors to one engine.

Tensor parallelism comes first, then FSDP2 or HSDP, or a ZeRO stage in nvFSDP's call. Gradients are averaged over data
ranks, since users of these functions bring mean losses; no second call completes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.axes import Axis
from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.core.errors import ConfigError, UnsupportedError, import_classes_from_paths, nearest
from meshwright.core.names import clean, is_within, owner
from meshwright.distributed.optimizer.parameter_groups import OptimizerSwap
from meshwright.distributed.weights.shards import whole_everywhere
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.module_kinds import own_tensor_plan
from meshwright.planning.build import with_units
from meshwright.planning.layout import BATCH, SAMPLES
from meshwright.planning.techniques import Precision, Techniques

from .data.fully_sharded import GradientCheck, sharded_modules
from .doors import averaging_plan, default_mp_policy, lay_out_module, mean_plan, rows_that_cut
from .mesh import (
    NEMO_NAMES,
    axis_size,
    can_merge_data,
    context_ranks,
    groups_of,
    has_dp_mesh,
    known_mesh,
    sizes_of_stage,
    with_data_on,
)
from .tensor.styles import requested_of, translate_to_torch_parallel_style
from .transform_registry import equip

__all__ = [
    "HAVE_NVFSDP",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "to_cpu",
    "translate_to_torch_parallel_style",
]

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
    """Copy a tensor to the CPU, a DTensor whole (all ranks of its mesh call this); return other values as they are."""
    if isinstance(v, DTensor):
        if v.is_meta:
            raise ConfigError("to_cpu: the DTensor is on meta, where it has no values. Materialise it first")
        return whole_everywhere(v).cpu()
    return v.cpu() if isinstance(v, Tensor) else v


# --- accept nvFSDP's call

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Strategy -> ZeRO stage (arXiv 1910.02054)."""
ALIASES = {"params": "optim_grads_params", "grads_params": "optim_grads_params"}
"""Older spellings: where parameters are sharded, so are their gradients and optimizer state."""
ELSEWHERE = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")
"""Switches that act on megatron-fsdp's own buffers."""
NVFSDP = "nvfsdp_strategy_parallelize"
DEFAULT_STRATEGY = "optim_grads_params"


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | Sequence[str | type] | None = None,
    nvfsdp_unit_modules: Sequence[str | type] | Mapping[str, str | ParallelStyle] | None = None,
    tp_shard_plan: Mapping[str, str | ParallelStyle] | None = None,
    data_parallel_sharding_strategy: str = DEFAULT_STRATEGY,
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """Cut ``model`` over the mesh's ``tp`` axis, then lay it over its data axes by a ZeRO stage, in place.

    The engine is this package's own, on FSDP2 (ZeRO: arXiv 1910.02054). Gradients are averaged over data ranks. Put
    ``model.accumulation_context(is_last_microbatch)`` around each microbatch of several; parameters that a stage
    keeps gathered until the last one are freed by its backward, so that nothing is stale whoever calls
    ``optimizer.step()``. Without it every backward counts as the last. With one data rank nothing is sharded, which
    is logged; all else acts.

    Args:
        device_mesh: meshwright's axis names, ``dp_shard`` among them, or NeMo's data_parallel and tensor_parallel.
            Shards are replicated over ``dp_replicate`` (HSDP).
        optimizer: made from the model's parameters, without state; its groups point to the laid out parameters
            afterwards. As in the older signature this position may hold the unit modules, and the next tp_shard_plan.
        nvfsdp_unit_modules: classes, or "package.module.Class", of modules gathered as units; None: each block.
        tp_shard_plan: as in ``fsdp2_strategy_parallelize``.
        data_parallel_sharding_strategy: no_shard (ZeRO-0), optim (1), optim_grads (2), optim_grads_params (3; also
            "params" and "grads_params").
        init_nvfsdp_with_meta_device: the model is on meta; each rank makes its own share of the initial weights.
        grad_reduce_in_fp32: sum gradients over ranks in fp32, else in the model's dtype.
        preserve_fp32_weights: parameters at rest and optimizer state in fp32, computation in the model's dtype.
        overlap_grad_reduce: reductions run beside the backward; False: each is waited for.
        overlap_param_gather: the next unit is gathered while one computes; False: when it is needed.
        check_for_nan_in_grad: ``NonFiniteError`` on all ranks, naming parameters, after a non-finite backward.
        average_in_collective: divide inside the reduction instead of after it.
        disable_bucketing: every module that has parameters is a unit of its own.
        calculate_per_token_loss: gradients are sums over data ranks: divide the loss by the tokens of all.

    Returns:
        The model; and the optimizer, where one was given.

    Raises:
        ConfigError: options that contradict each other, the mesh or the model; an optimizer with state, or of another
            model.
        IntegrityError: ranks bring different weights. Build the model on meta, or under one seed on every rank.
        UnsupportedError: options about buffers of megatron-fsdp (keep_fp8_transpose_cache_when_using_custom_fsdp,
            nccl_ub, fsdp_double_buffer), and features that the engine lacks.
    """
    given = dict(locals())
    optimizer, units, tp_shard_plan, strategy = _by_kind(
        optimizer, nvfsdp_unit_modules, tp_shard_plan, data_parallel_sharding_strategy
    )
    given |= {"nvfsdp_unit_modules": units, "data_parallel_sharding_strategy": ALIASES.get(strategy, strategy)}
    device_mesh = known_mesh(device_mesh, NEMO_NAMES)
    if (name := given["data_parallel_sharding_strategy"]) not in STRATEGIES:
        legal = [*STRATEGIES, *ALIASES]
        raise ConfigError(
            f"data_parallel_sharding_strategy = {name!r}: legal are {', '.join(legal)}.{nearest(str(name), legal)}"
        )
    if given["calculate_per_token_loss"] and given["average_in_collective"]:
        raise ConfigError(
            "calculate_per_token_loss = True sums gradients over data ranks, and average_in_collective = True averages"
            " them. Leave one of them out."
        )
    if given["disable_bucketing"] and given["nvfsdp_unit_modules"] is not None:
        raise ConfigError(
            "disable_bucketing = True makes every module with parameters a unit, and nvfsdp_unit_modules names others."
            " Leave one of them out."
        )
    if key := next((key for key in ELSEWHERE if given[key]), None):
        raise UnsupportedError(
            f"{key} = True is about buffers of megatron-fsdp, and this function lays models out by FSDP2. Leave it out."
        )
    facts = model_facts(model)
    if facts.on_meta != init_nvfsdp_with_meta_device:
        where, value = ("on meta", True) if facts.on_meta else ("not on meta", False)
        raise ConfigError(
            f"init_nvfsdp_with_meta_device = {init_nvfsdp_with_meta_device}, but the {facts.kind} is {where}."
            f" Set it to {value}" + ("." if value else ", or build the model under torch.device('meta').")
        )
    own = facts.parameters[0].dtype
    wide = own if own == "float64" else "float32"  # fp64 is wider than the fp32 that two switches name, and stays
    requested = Techniques(
        tensor_plan=requested_of(tp_shard_plan, model),
        zero_stage=STRATEGIES[given["data_parallel_sharding_strategy"]],  # type: ignore[arg-type]
        data_parallel="fully_shard",
        precision=Precision(wide if preserve_fp32_weights else own, own, wide if grad_reduce_in_fp32 else own),
    )
    swap = OptimizerSwap(model, optimizer) if optimizer is not None else None
    model = _lay_out(model, facts, device_mesh, requested, given)
    if swap is None or optimizer is None:
        return model
    swap.apply(model)
    return model, optimizer


def _by_kind(
    third: Any, fourth: Any, tp_shard_plan: Any, strategy: Any
) -> tuple[torch.optim.Optimizer | None, Sequence[str | type] | None, Mapping[str, str | ParallelStyle] | None, str]:
    """Sort the arguments after the mesh, in the current order or the older one without the optimizer."""
    if isinstance(tp_shard_plan, str) and isinstance(third, (list, tuple)):  # each one place earlier
        if strategy != DEFAULT_STRATEGY:
            raise ConfigError(
                f"without an optimizer in third place, what follows '{tp_shard_plan}' is given by name, and here"
                f" {strategy!r} stands there: init_nvfsdp_with_meta_device=..., grad_reduce_in_fp32=..."
            )
        tp_shard_plan, strategy = None, tp_shard_plan
    if tp_shard_plan is not None and not isinstance(tp_shard_plan, Mapping):
        raise ConfigError(
            f"tp_shard_plan is a {type(tp_shard_plan).__name__}: it maps names of layers to styles, such as"
            f" {{'model.layers.*.mlp.up_proj': 'colwise'}}"
        )
    if not isinstance(strategy, str):
        raise ConfigError(
            f"data_parallel_sharding_strategy is a {type(strategy).__name__}: it is a word, such as 'optim_grads'"
        )
    optimizer, units = third, fourth
    if isinstance(third, (list, tuple)):
        optimizer, units = None, third
        if isinstance(fourth, Mapping):
            fourth, tp_shard_plan = None, tp_shard_plan or fourth
        if fourth is not None:
            raise ConfigError("the unit modules were given twice, third and as nvfsdp_unit_modules: give them once")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the third argument is a {type(optimizer).__name__}: it is an optimizer, or, as in the older signature,"
            f" a list of unit modules"
        )
    if units is not None and (isinstance(units, str) or not isinstance(units, Sequence)):
        raise ConfigError(
            f"nvfsdp_unit_modules is a {type(units).__name__}: it is a list of classes, or of their paths"
        )
    return optimizer, units, tp_shard_plan, strategy


def _lay_out(
    model: nn.Module, facts: ModelFacts, device_mesh: DeviceMesh, requested: Techniques, given: Mapping[str, Any]
) -> nn.Module:
    strategy = given["data_parallel_sharding_strategy"]
    replicas, shards = (axis_size(device_mesh, axis) for axis in SAMPLES)
    if STRATEGIES[strategy] and shards * context_ranks(device_mesh) == 1 < replicas:
        raise ConfigError(
            f"data_parallel_sharding_strategy = {strategy} shards over dp_shard, which is 1 on this mesh beside"
            f" dp_replicate = {replicas}. Make the mesh with dp_shard = {replicas} and dp_replicate = 1, or use"
            f" no_shard."
        )
    if not STRATEGIES[strategy] and shards > 1:  # all data ranks on the replicating axis
        if not can_merge_data(device_mesh):
            raise ConfigError(
                f"data_parallel_sharding_strategy = no_shard replicates over all data ranks, but this mesh shards over"
                f" dp_shard = {shards}. Make it with dp_replicate = {replicas * shards} and dp_shard = 1."
            )
        device_mesh = with_data_on(device_mesh, Axis.DP_REPLICATE)
    plan = mean_plan(facts, device_mesh, requested)
    chosen = _chosen_units(model, facts, given)
    if set(chosen) != set(facts.blocks):
        if plan.tensor is not None or plan.experts is not None:
            key = "disable_bucketing" if given["disable_bucketing"] else "nvfsdp_unit_modules"
            raise UnsupportedError(
                f"{key}: beside tensor or expert parallelism the units are the repeated blocks"
                f" ({', '.join(facts.blocks[:2])} …), whose modules use each other's parameters. Leave it out."
            )
        plan = with_units(facts, plan, chosen, reshard=STRATEGIES[strategy] in (0, 3))
    if given["calculate_per_token_loss"] and plan.experts is not None:
        raise UnsupportedError(
            f"calculate_per_token_loss = True does not go with experts that are shared out (ep = {plan.experts.ranks}):"
            f" their gradients are averaged where tokens come back. Use parallelize(), which sums."
        )
    if not given["overlap_grad_reduce"] and is_accelerator(plan.device) and plan.size(Axis.DP_REPLICATE) > 1:
        raise UnsupportedError(
            "overlap_grad_reduce = False waits for reductions over dp_shard, and torch offers no way to wait for those"
            f" over dp_replicate = {plan.size(Axis.DP_REPLICATE)}. Set it to True, or dp_replicate = 1."
        )
    if plan.shares.batch_ranks == 1:
        words = "there is one data rank, so %s shards nothing; precision, units, and the check of gradients act"
        log.info(f"%s: {words}", NVFSDP, strategy)
    rows = ("master_dtype", "tensor_parallel", *rows_that_cut(model, device_mesh), "fully_shard")
    rows = (*rows, *(("weights",) if facts.on_meta else ()))
    model = lay_out_module(model, facts, plan, device_mesh, rows, door=NVFSDP)
    # each unit is configured as far as torch allows
    stacks = {unit.name for unit in plan.units if unit.experts}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and clean(name) not in stacks and not given["average_in_collective"]:
            module.set_force_sum_reduction_for_comms(True)  # torch then divides after the reduction, by all data ranks
            if given["calculate_per_token_loss"]:
                module.set_gradient_divide_factor(1.0)
    for module in sharded_modules(model):
        if not given["overlap_param_gather"]:
            module.set_modules_to_forward_prefetch([])
            # torch takes an empty list for its default, the previous unit
            module.set_modules_to_backward_prefetch([module])
        if not given["overlap_grad_reduce"]:
            module.set_custom_reduce_scatter(_Waiting())  # type: ignore[arg-type]  (torch's type is not public)
    if given["check_for_nan_in_grad"]:
        GradientCheck(model, groups_of(device_mesh, *BATCH, Axis.TP))
    return equip(model, plan)


def _chosen_units(model: nn.Module, facts: ModelFacts, given: Mapping[str, Any]) -> tuple[str, ...]:
    """List the modules to be gathered as units: the blocks, those of the given classes, or all that hold parameters."""
    modules = [(clean(name), module) for name, module in model.named_modules() if name]
    if given["disable_bucketing"]:
        # modules that contain no other unit; tied ones stay with the root
        tied = {owner(name) for p in facts.parameters if p.aliases for name in (p.name, *p.aliases)}
        holding = [name for name, module in modules if next(module.parameters(recurse=False), None) is not None]
        # its forward calls no child
        read = [name for name, module in modules if isinstance(module, nn.MultiheadAttention)]
        holding = [name for name in holding if not any(is_within(name, outer) and name != outer for outer in read)]
        nested = {outer for outer in holding for inner in holding if inner != outer and is_within(inner, outer)}
        return tuple(name for name in holding if name not in tied and name not in nested)
    if (units := given["nvfsdp_unit_modules"]) is None:
        return facts.blocks
    classes = [one if isinstance(one, type) else import_classes_from_paths([one])[0] for one in units]
    found = [name for name, module in modules if isinstance(module, tuple(classes))]
    for one in classes:
        if not any(isinstance(module, one) for module in model.modules()):
            raise ConfigError(
                f"nvfsdp_unit_modules: {facts.kind} has no module of the class {one.__module__}.{one.__qualname__}"
            )
    for inner in found:
        if outer := next((other for other in found if other != inner and is_within(inner, other)), None):
            raise ConfigError(
                f"nvfsdp_unit_modules: {inner} is inside {outer}, and both are named. Name one of their classes."
            )
    return tuple(found)


class _Waiting:
    """A reduce-scatter for which the host waits, so that no later work of the backward is queued beside it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
        finish_stream(output_tensor.device)
