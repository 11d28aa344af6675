"""Accept nvFSDP's call as a door into the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.axes import Axis
from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.core.errors import ConfigError, NonFiniteError, UnsupportedError, import_classes_from_paths, nearest
from meshwright.core.names import clean, is_within, owner
from meshwright.core.torch_private import call_behind_backward, tree_leaves
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.data.fully_sharded import sharded_modules
from meshwright.distributed.doors.transform_registry import equip
from meshwright.distributed.mesh import (
    NEMO_NAMES,
    axis_sizes,
    can_merge_data,
    context_ranks,
    groups_of,
    known_mesh,
    sizes_of_stage,
    with_data_on,
)
from meshwright.distributed.process import agree
from meshwright.distributed.torch_private import local_part
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.collectives import step_collectives
from meshwright.planning.context.collectives import context_collectives
from meshwright.planning.data import Holding, Narrow, at_rest, trained_cuts, units_of
from meshwright.planning.float8.rules import scales_of_gathered
from meshwright.planning.layout import BATCH, SAMPLES
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Precision, Techniques

from .functions import lay_out_module, rows_that_cut
from .styles import requested_of

# --- define the options of ``nvfsdp_strategy_parallelize``, and which of them work without megatron-fsdp

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Strategy -> ZeRO stage (arXiv 1910.02054)."""
ALIASES = {"params": "optim_grads_params", "grads_params": "optim_grads_params"}
"""Older spellings: where parameters are sharded, so are their gradients and optimizer state."""
ELSEWHERE = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")
"""Switches that act on megatron-fsdp's own buffers."""


@dataclass(frozen=True)
class ZeroOptions:
    """The keyword arguments of the call, under their own names."""

    nvfsdp_unit_modules: Sequence[str | type] | None
    data_parallel_sharding_strategy: str
    init_nvfsdp_with_meta_device: bool
    grad_reduce_in_fp32: bool
    preserve_fp32_weights: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    check_for_nan_in_grad: bool
    average_in_collective: bool
    disable_bucketing: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool
    nccl_ub: bool
    fsdp_double_buffer: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ZeroOptions:
        """Pick the options out of a call's arguments by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def strategy(self) -> str:
        """One of the four strategies; raises ConfigError for another name."""
        name = ALIASES.get(self.data_parallel_sharding_strategy, self.data_parallel_sharding_strategy)
        if name not in STRATEGIES:
            legal = [*STRATEGIES, *ALIASES]
            raise ConfigError(
                f"data_parallel_sharding_strategy = {name!r}: legal are {', '.join(legal)}.{nearest(str(name), legal)}"
            )
        return name

    @property
    def stage(self) -> int:
        return STRATEGIES[self.strategy]

    def check(self) -> None:
        """Raise ConfigError for an unknown strategy, and for options that contradict each other."""
        _ = self.strategy
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ConfigError(
                "calculate_per_token_loss = True sums gradients over data ranks, and average_in_collective = True"
                " averages them. Leave one of them out."
            )
        if self.disable_bucketing and self.nvfsdp_unit_modules is not None:
            raise ConfigError(
                "disable_bucketing = True makes every module with parameters a unit, and nvfsdp_unit_modules names"
                " others. Leave one of them out."
            )
        for key in ELSEWHERE:
            if getattr(self, key):
                raise UnsupportedError(
                    f"{key} = True is about buffers of megatron-fsdp, and this function lays models out by FSDP2. Leave"
                    f" it out."
                )


# --- choose the modules that are gathered as units, as requested from ``nvfsdp_strategy_parallelize``


def with_units(model: nn.Module, facts: ModelFacts, plan: Plan, options: ZeroOptions) -> Plan:
    """Return the plan with the requested units.

    Raises:
        ConfigError: a class of which the model has no module; units inside each other.
        UnsupportedError: units that tensor or expert parallelism cannot have.
    """
    if options.disable_bucketing:
        key, chosen = "disable_bucketing", tuple(_holders(model, facts))
    elif options.nvfsdp_unit_modules is not None:
        key, chosen = "nvfsdp_unit_modules", _of_classes(model, facts, classes_of(options))
    else:
        return plan
    if set(chosen) == set(facts.blocks):
        return plan
    if plan.tensor is not None or plan.experts is not None:
        raise UnsupportedError(
            f"{key}: beside tensor or expert parallelism the units are the repeated blocks"
            f" ({', '.join(facts.blocks[:2])} …), whose modules use each other's parameters. Leave it out."
        )
    facts = replace(at_rest(facts, plan.precision), blocks=chosen)
    reshard = options.stage in (0, 3)
    shares = plan.shares
    narrow = Narrow.of(plan.float8, plan.quantize)
    units = units_of(facts, Holding(shares.shards, plan.precision, narrow=narrow, optimizer=plan.optimizer), reshard)
    scales = tuple(scales_of_gathered(plan.float8, None, shares.shards))
    of_rows = () if plan.context is None else context_collectives(facts, plan.context, plan.precision, {})
    moved = step_collectives(shares, units, plan.data, plan.precision, (*scales, *of_rows), trained_cuts(facts, None))
    return replace(plan, units=units, collectives=moved)


def classes_of(options: ZeroOptions) -> list[type]:
    requested = options.nvfsdp_unit_modules or ()
    return [one if isinstance(one, type) else import_classes_from_paths([one])[0] for one in requested]


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


def _holders(model: nn.Module, facts: ModelFacts) -> list[str]:
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
    return [name for name in holding if name not in tied and name not in nested]


# --- check gradients when a backward ends, and report on all ranks


class GradientCheck:
    """Raises, on all ranks after a backward, if a gradient that the backward reduces is not finite on any rank.

    Gradients of a microbatch that wait for the next one are not checked: an error in them is in the sum.

    Args:
        groups: groups of all ranks that run the same backward.
    """

    def __init__(self, model: nn.Module, groups: list[dist.ProcessGroup]):
        self.model, self.groups, self._waits = model, groups, False
        model.register_forward_hook(self._begin)

    def _begin(self, model: nn.Module, inputs: tuple, output: Any) -> None:
        """Hook the output after FSDP2's own hooks, so that gradients are reduced before the check."""
        self._waits = False
        if not torch.is_grad_enabled():
            return
        leaves = [*tree_leaves(output), getattr(output, "logits", None)]
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        if not tensors:
            raise ConfigError(
                f"check_for_nan_in_grad = True: {type(model).__name__} returns a {type(output).__name__}, in which no"
                f" tensor is found whose"
                f" backward could be waited for. Return logits (or an object with .logits), or set it to False."
            )
        for tensor in tensors.values():
            tensor.register_hook(self._wait_for_the_end)

    def _wait_for_the_end(self, gradient: Tensor) -> None:
        if not self._waits:
            self._waits = True
            call_behind_backward(self._check)

    def _check(self) -> None:
        self._waits = False
        if not fully_sharded.reduces(self.model):
            return
        named = [(clean(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
        words = agree.total(torch.stack([_is_wrong(parameter) for _, parameter in named]), self.groups)
        if wrong := [name for (name, _), count in zip(named, words.tolist(), strict=True) if count]:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise NonFiniteError(
                f"check_for_nan_in_grad: the gradient of {', '.join(wrong[:4])}{more} is NaN or infinite. The"
                f" optimizer has not stepped."
            )


def _is_wrong(parameter: Tensor) -> Tensor:
    """Return 1 if this rank's part of a gradient is not finite, else 0: 0-dim int64, on the parameter's device."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), dtype=torch.int64, device=parameter.device)
    local = local_part(gradient)
    return (~local.isfinite().all()).long()


# --- point an optimizer that was made before the layout to the laid out parameters


class OptimizerSwap:
    """A record of an optimizer's parameters, made before the layout; ``apply`` it afterwards.

    Raises:
        ConfigError: the optimizer has state already, or holds a parameter that is not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        if optimizer.state and all(float(state.get("step", 1)) == 0 for state in optimizer.state.values()):
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} creates its state in its constructor, for whole parameters."
                f" Leave optimizer out, and make it from the parameters of the model that is returned."
            )
        if optimizer.state:
            raise ConfigError(
                f"optimizer: this {type(optimizer).__name__} has the state of {len(optimizer.state)} parameters"
                f" already, which are whole and would have to be cut. Lay the model out before the first step, or load"
                f" the state afterwards (meshwright.load)."
            )
        names = {parameter: clean(name) for name, parameter in model.named_parameters()}
        self.optimizer = optimizer
        self.names: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            if any(parameter not in names for parameter in group["params"]):
                raise ConfigError(
                    f"optimizer: its group {number} holds a parameter that is not one of this {type(model).__name__}'s."
                    f" Make it from model.parameters(), of the model that is given."
                )
            self.names.append([names[parameter] for parameter in group["params"]])

    def apply(self, model: nn.Module) -> None:
        """Point every group to the model's parameters of the same names; its options stay."""
        parameters = {clean(name): parameter for name, parameter in model.named_parameters()}
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            group["params"] = [parameters[name] for name in names]


# --- provide nvFSDP's one call as a door into the engine

log = logging.getLogger("meshwright")
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
    given = locals()
    optimizer, units, tp_shard_plan, strategy = _by_kind(
        optimizer, nvfsdp_unit_modules, tp_shard_plan, data_parallel_sharding_strategy
    )
    device_mesh = known_mesh(device_mesh, NEMO_NAMES)
    options = ZeroOptions.of(given | {"nvfsdp_unit_modules": units, "data_parallel_sharding_strategy": strategy})
    options.check()
    facts = model_facts(model)
    _check_meta(facts, options)
    requested = Techniques(tensor_plan=requested_of(tp_shard_plan, model))
    swap = OptimizerSwap(model, optimizer) if optimizer is not None else None
    model = _lay_out(model, facts, device_mesh, options, requested)
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
    model: nn.Module, facts: ModelFacts, device_mesh: DeviceMesh, options: ZeroOptions, requested: Techniques
) -> nn.Module:
    device_mesh = _mesh_of_stage(device_mesh, options)
    requested = replace(
        requested, zero_stage=options.stage, data_parallel="fully_shard", precision=_precision(facts, options)
    )  # type: ignore[arg-type]
    plan = plan_for_mesh_sizes(facts, sizes_of_stage(device_mesh), device_mesh.device_type, requested, "mean")
    plan = with_units(model, facts, plan, options)
    _check(plan, options)
    if plan.shares.batch_ranks == 1:
        log.info(
            "nvfsdp_strategy_parallelize: there is one data rank, so %s shards nothing; precision, units, and the"
            " check of gradients act",
            options.strategy,
        )
    rows = ("master_dtype", "tensor_parallel", *rows_that_cut(model, device_mesh), "fully_shard")
    rows = (*rows, *(("weights",) if facts.on_meta else ()))
    model = lay_out_module(model, facts, plan, device_mesh, rows, door=DOOR)
    _configure(model, plan, options)
    if options.check_for_nan_in_grad:
        GradientCheck(model, groups_of(device_mesh, *BATCH, Axis.TP))
    return equip(model, plan)


def _check_meta(facts: ModelFacts, options: ZeroOptions) -> None:
    if facts.on_meta != options.init_nvfsdp_with_meta_device:
        where, value = ("on meta", True) if facts.on_meta else ("not on meta", False)
        raise ConfigError(
            f"init_nvfsdp_with_meta_device = {options.init_nvfsdp_with_meta_device}, but the {facts.kind} is {where}."
            f" Set it to {value}" + ("." if value else ", or build the model under torch.device('meta').")
        )


def _precision(facts: ModelFacts, options: ZeroOptions) -> Precision:
    """Choose dtypes; fp64 is wider than the fp32 that two switches name, and stays."""
    own = facts.parameters[0].dtype
    wide = own if own == "float64" else "float32"
    return Precision(wide if options.preserve_fp32_weights else own, own, wide if options.grad_reduce_in_fp32 else own)


def _mesh_of_stage(device_mesh: DeviceMesh, options: ZeroOptions) -> DeviceMesh:
    """Return the mesh; for no_shard with all data ranks on the replicating axis."""
    sizes = axis_sizes(device_mesh)
    replicas, shards = (sizes.get(axis.value, 1) for axis in SAMPLES)
    if options.stage and shards * context_ranks(device_mesh) == 1 < replicas:
        raise ConfigError(
            f"data_parallel_sharding_strategy = {options.strategy} shards over dp_shard, which is 1 on this mesh"
            f" beside dp_replicate ="
            f" {replicas}. Make the mesh with dp_shard = {replicas} and dp_replicate = 1, or use no_shard."
        )
    if options.stage or shards == 1:
        return device_mesh
    if not can_merge_data(device_mesh):
        raise ConfigError(
            f"data_parallel_sharding_strategy = no_shard replicates over all data ranks, but this mesh shards over"
            f" dp_shard = {shards}. Make it with dp_replicate = {replicas * shards} and dp_shard = 1."
        )
    return with_data_on(device_mesh, Axis.DP_REPLICATE)


def _check(plan: Plan, options: ZeroOptions) -> None:
    if options.calculate_per_token_loss and plan.experts is not None:
        raise UnsupportedError(
            f"calculate_per_token_loss = True does not go with experts that are shared out (ep = {plan.experts.ranks}):"
            f" their gradients are averaged where tokens come back. Use parallelize(), which sums."
        )
    if not options.overlap_grad_reduce and is_accelerator(plan.device) and plan.size(Axis.DP_REPLICATE) > 1:
        raise UnsupportedError(
            "overlap_grad_reduce = False waits for reductions over dp_shard, and torch offers no way to wait for those"
            f" over dp_replicate = {plan.size(Axis.DP_REPLICATE)}. Set it to True, or dp_replicate = 1."
        )


def _configure(model: nn.Module, plan: Plan, options: ZeroOptions) -> None:
    """Configure each unit as far as torch allows."""
    stacks = {unit.name for unit in plan.units if unit.experts}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and clean(name) not in stacks and not options.average_in_collective:
            module.set_force_sum_reduction_for_comms(True)  # torch then divides after the reduction, by all data ranks
            if options.calculate_per_token_loss:
                module.set_gradient_divide_factor(1.0)
    for module in sharded_modules(model):
        if not options.overlap_param_gather:
            module.set_modules_to_forward_prefetch([])
            # torch takes an empty list for its default, the previous unit
            module.set_modules_to_backward_prefetch([module])
        if not options.overlap_grad_reduce:
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
