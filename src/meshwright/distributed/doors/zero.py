"""Accept nvFSDP's call as a door into the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.axes import Axis
from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.core.errors import ConfigError, UnsupportedError, import_classes_from_paths, nearest
from meshwright.core.names import clean, is_within, owner
from meshwright.distributed.data.fully_sharded import GradientCheck, sharded_modules
from meshwright.distributed.mesh import (
    NEMO_NAMES,
    axis_size,
    can_merge_data,
    context_ranks,
    groups_of,
    known_mesh,
    with_data_on,
)
from meshwright.distributed.optimizer.parameter_groups import OptimizerSwap
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.planning.build import with_units
from meshwright.planning.layout import BATCH, SAMPLES
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Precision, Techniques

from .functions import lay_out_module, mean_plan, rows_that_cut
from .styles import requested_of
from .transform_registry import equip

log = logging.getLogger("meshwright")

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Strategy -> ZeRO stage (arXiv 1910.02054)."""
ALIASES = {"params": "optim_grads_params", "grads_params": "optim_grads_params"}
"""Older spellings: where parameters are sharded, so are their gradients and optimizer state."""
ELSEWHERE = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")
"""Switches that act on megatron-fsdp's own buffers."""
DOOR = "nvfsdp_strategy_parallelize"
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
    _check_switches(given)
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


def _check_switches(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown strategy, and for switches that contradict each other."""
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


def _lay_out(
    model: nn.Module, facts: ModelFacts, device_mesh: DeviceMesh, requested: Techniques, given: Mapping[str, Any]
) -> nn.Module:
    strategy = given["data_parallel_sharding_strategy"]
    device_mesh = _mesh_of_stage(device_mesh, strategy)
    plan = mean_plan(facts, device_mesh, requested)
    units, chosen = given["nvfsdp_unit_modules"], facts.blocks
    if given["disable_bucketing"]:
        chosen = _holders(model, facts)
    elif units is not None:
        classes = [one if isinstance(one, type) else import_classes_from_paths([one])[0] for one in units]
        chosen = _of_classes(model, facts, classes)
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
        log.info(f"%s: {words}", DOOR, strategy)
    rows = ("master_dtype", "tensor_parallel", *rows_that_cut(model, device_mesh), "fully_shard")
    rows = (*rows, *(("weights",) if facts.on_meta else ()))
    model = lay_out_module(model, facts, plan, device_mesh, rows, door=DOOR)
    _configure(model, plan, given)
    if given["check_for_nan_in_grad"]:
        GradientCheck(model, groups_of(device_mesh, *BATCH, Axis.TP))
    return equip(model, plan)


def _of_classes(model: nn.Module, facts: ModelFacts, classes: list[type]) -> tuple[str, ...]:
    found = [clean(name) for name, module in model.named_modules() if name and isinstance(module, tuple(classes))]
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


def _holders(model: nn.Module, facts: ModelFacts) -> tuple[str, ...]:
    """List modules that hold parameters of their own, and contain no other unit; tied ones stay with the root."""
    tied = {owner(name) for p in facts.parameters if p.aliases for name in (p.name, *p.aliases)}
    holding = [
        clean(name)
        for name, module in model.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    # its forward calls no child
    read = [clean(name) for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    holding = [name for name in holding if not any(is_within(name, outer) and name != outer for outer in read)]
    nested = {outer for outer in holding for inner in holding if inner != outer and is_within(inner, outer)}
    return tuple(name for name in holding if name not in tied and name not in nested)


def _mesh_of_stage(device_mesh: DeviceMesh, strategy: str) -> DeviceMesh:
    """Return the mesh; for no_shard with all data ranks on the replicating axis."""
    replicas, shards = (axis_size(device_mesh, axis) for axis in SAMPLES)
    if STRATEGIES[strategy] and shards * context_ranks(device_mesh) == 1 < replicas:
        raise ConfigError(
            f"data_parallel_sharding_strategy = {strategy} shards over dp_shard, which is 1 on this mesh beside"
            f" dp_replicate = {replicas}. Make the mesh with dp_shard = {replicas} and dp_replicate = 1, or use"
            f" no_shard."
        )
    if STRATEGIES[strategy] or shards == 1:
        return device_mesh
    if not can_merge_data(device_mesh):
        raise ConfigError(
            f"data_parallel_sharding_strategy = no_shard replicates over all data ranks, but this mesh shards over"
            f" dp_shard = {shards}. Make it with dp_replicate = {replicas * shards} and dp_shard = 1."
        )
    return with_data_on(device_mesh, Axis.DP_REPLICATE)


def _configure(model: nn.Module, plan: Plan, given: Mapping[str, Any]) -> None:
    """Configure each unit as far as torch allows."""
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


class _Waiting:
    """A reduce-scatter for which the host waits, so that no later work of the backward is queued beside it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
        finish_stream(output_tensor.device)
