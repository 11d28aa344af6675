"""Chain registered model transforms from config: each technique by its name, with the options that its users know.

Built-in ones apply in the fixed order, in any order of config. Gradients are averaged over data ranks, as in torch:
these transforms serve loops that bring mean losses.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.axes import Axis
from meshwright.core.config import to_dict
from meshwright.core.devices import DEFAULT_BACKEND
from meshwright.core.dtypes import canonical_dtype, torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError, import_classes_from_paths, nearest
from meshwright.core.names import clean
from meshwright.distributed.mesh import (
    axis_size,
    axis_sizes,
    build_mesh,
    can_merge_data,
    context_ranks,
    data_groups,
    known_mesh,
    with_data_on,
)
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.distributed.setup import choose_backend, single_process_mesh
from meshwright.distributed.step.part import ModelPart
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights import audit
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.planning.layout import SAMPLES, Layout
from meshwright.planning.plan import Plan
from meshwright.planning.recompute import check_kept
from meshwright.planning.rules import raise_all
from meshwright.planning.techniques import Techniques, TensorStyleRequest

from .doors import CONTEXT, OVER_AXES, averaging_plan, float8_plan, has_work, lay_out_module, mean_plan, rows_that_cut
from .transform_registry import (
    BaseDistributedTransform,
    DDPWrappedModel,
    ModelTransform,
    apply_model_transforms,
    build_model_transform,
    equip,
    register_model_transform,
)

__all__ = [
    "ActivationCheckpointTransform",
    "ActivationCheckpointTransformConfig",
    "BaseDistributedTransform",
    "CompileTransform",
    "CompileTransformConfig",
    "ContextParallelTransform",
    "ContextParallelTransformConfig",
    "DDPTransform",
    "DDPTransformConfig",
    "DDPWrappedModel",
    "ExpertParallelTransform",
    "ExpertParallelTransformConfig",
    "Float8Transform",
    "Float8TransformConfig",
    "FullyShardTransform",
    "FullyShardTransformConfig",
    "LoadWeightsTransformConfig",
    "MixedPrecisionConfig",
    "ModelTransform",
    "ModelTransformConfig",
    "OffloadConfig",
    "TensorParallelTransform",
    "TensorParallelTransformConfig",
    "apply_model_transforms",
    "build_model_transform",
    "register_model_transform",
]

# --- define the options of the built-in transforms, under the names that their users know


@dataclass
class ModelTransformConfig:
    """Base class of transforms' configs, under Optimus-DL's name; any dataclass will do as well.

    Attributes:
        _name: name of the transform, where a config alone is given to ``build_model_transform``.
    """

    _name: str = field(default="", kw_only=True, repr=False, compare=False)


@dataclass
class DDPTransformConfig(ModelTransformConfig):
    """torch's DistributedDataParallel options of the same names."""

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


@dataclass
class MixedPrecisionConfig:
    """dtype names: float32/fp32, float16/fp16/half, bfloat16/bf16, float64/double; None: torch's default."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, key) is not None:
                canonical_dtype(getattr(self, key), where=f"mixed_precision.{key}")

    @property
    def policy(self) -> MixedPrecisionPolicy:
        self.__post_init__()  # a field may have been changed

        def dtype(name: str | None) -> torch.dtype | None:
            return None if name is None else torch_dtype(name)

        return MixedPrecisionPolicy(
            dtype(self.param_dtype), dtype(self.reduce_dtype), dtype(self.output_dtype), self.cast_forward_inputs
        )


@dataclass
class OffloadConfig:
    """Parameters, gradients and optimizer state in host memory; ``pin_memory`` if there is a GPU to copy to."""

    cpu_offload: bool = False
    pin_memory: bool = True


@dataclass
class FullyShardTransformConfig(ModelTransformConfig):
    """Options of FSDP2 / HSDP.

    ``use_hybrid_sharding`` shards inside a node and replicates across nodes if the layout left both sizes open; false
    shards over all ranks. ``sync_grad_accum``: communicate gradients with every microbatch; "shard" reduce-scatters
    each and postpones only the all-reduce over replicas.
    """

    reshard_after_forward: bool | int = False
    mixed_precision: MixedPrecisionConfig | None = None
    offload: OffloadConfig | None = None
    use_hybrid_sharding: bool = True
    sync_grad_accum: bool | Literal["shard"] = False


@dataclass
class Float8TransformConfig(ModelTransformConfig):
    """Options of float8 multiplication in linear layers.

    ``recipe``: tensorwise, rowwise or rowwise_with_gw_hp. ``filter``: regular expressions on paths of other layers.
    ``enable_fsdp_float8_all_gather``: a later fully_shard gathers their weights in float8; tensorwise alone.
    """

    recipe: str = "tensorwise"
    filter: tuple[str, ...] = ()
    enable_fsdp_float8_all_gather: bool = False


@dataclass
class TensorParallelTransformConfig(ModelTransformConfig):
    """Options of weights cut over the mesh's tp axis.

    ``sequence_parallel``: between blocks each rank has its part of the sequence. ``regather``: activations are
    gathered again in backward, not saved. ``plan``: module pattern -> style by transformers' names; empty: measured.
    """

    sequence_parallel: bool = True
    regather: bool = True
    plan: dict[str, str] = field(default_factory=dict)


@dataclass
class ExpertParallelTransformConfig(ModelTransformConfig):
    """No options: the mesh fixes the number of ranks that share experts (``ep``)."""


@dataclass
class ContextParallelTransformConfig(ModelTransformConfig):
    """How attention reaches other ranks' tokens: auto, all_gather, ring, ulysses, ulysses_ring or halo."""

    method: str = "auto"


@dataclass
class ActivationCheckpointTransformConfig(ModelTransformConfig):
    """Recomputation of every module of the given classes ("package.module.Class", or "Class"); none: each block.

    ``ops_to_save``: saved results, by operators ("aten.mm.default", or "aten.mm" for all its forms) or by names of
    ``techniques.checkpoint_keep``.
    """

    layer_classes: tuple[str, ...] = ()
    use_reentrant: bool = False
    ops_to_save: tuple[str, ...] = ()


@dataclass
class CompileTransformConfig(ModelTransformConfig):
    """Options of torch.compile, applied to each repeated block.

    ``activation_memory_budget``: share, above 0 and below 1, of a block's activations for backward that it may save.
    """

    compile_kwargs: dict[str, Any] = field(default_factory=dict)
    activation_memory_budget: float | None = None


@dataclass
class LoadWeightsTransformConfig(ModelTransformConfig):
    """Options of loading weights.

    ``checkpoint_path``: a Hugging Face folder with safetensors, or a checkpoint of meshwright (only its model is
    read). ``skip_on_restart``: do nothing if a run resumes, whose own checkpoint will be loaded instead.
    """

    checkpoint_path: str
    skip_on_restart: bool = False


# --- define the built-in transforms

log = logging.getLogger("meshwright")


class PlannedTransform(BaseDistributedTransform):
    """A transform that makes a plan from its config, and applies it."""

    rows: tuple[str, ...] = ()
    """Rows of the order to apply, where they are not that of its name alone."""
    broadcasts = False
    """Whether ranks with different weights get those of the first rank; else they are refused."""

    def requested(self) -> Techniques:
        """Translate the config."""
        return Techniques()

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        return mean_plan(facts, device_mesh, self.requested())

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if kwargs:
            raise ConfigError(f"{type(self).__name__}.apply takes the model alone, and was given {', '.join(kwargs)}")
        facts = model_facts(model)
        if (device := self.context.get("device")) is not None and not facts.on_meta:
            model = model.to(device)
        device_mesh = self.device_mesh()
        plan = self.plan(facts, device_mesh)
        door, seed, rows = type(self).__name__, self.context.get("seed", 0), self.rows or (self.registered_name,)
        options = {"door": door, "seed": seed, "takes_any_weights": self.broadcasts}
        model = lay_out_module(model, facts, plan, device_mesh, rows, **options)
        return equip(self.finish(model, facts, plan, device_mesh), plan)

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        """Finish the model after the plan has been applied."""
        return model

    def device_mesh(self) -> DeviceMesh | None:
        """Return the mesh that is given, or build that of a layout over all processes, which have a group."""
        if (given := self.context.get("device_mesh")) is not None:
            return known_mesh(given)
        if (layout := self.layout()) is None:
            return None
        device_type = choose_backend(DEFAULT_BACKEND)[1]
        if dist.is_initialized():
            sizes = layout.resolve(dist.get_world_size(), ranks_per_node=ranks_per_node() or None)
            return build_mesh(sizes, device_type)
        if (world := get_world_info()[2]) > 1:
            raise ConfigError(
                f"there are {world} processes and no process group: call init_distributed before the transforms, or"
                f" give them device_mesh="
            )
        layout.resolve(world)
        return single_process_mesh(device_type)

    def layout(self) -> Layout | None:
        """Return the layout to make a mesh from where none is given."""
        return None


class AxisTransform(PlannedTransform):
    """A transform over one axis of the mesh."""

    def layout(self) -> Layout | None:
        return self.context.get("layout")

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        has_work(self.registered_name, facts.module, device_mesh, door=self.registered_name)
        return OVER_AXES[self.registered_name].plan(facts, device_mesh, self.requested())


class DataTransform(PlannedTransform):
    """A transform over the data axes: rows must be cut before, and the result is audited."""

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        assert device_mesh is not None
        if rows_that_cut(facts.module, device_mesh):
            raise ConfigError(
                f"the mesh has cp = {context_ranks(device_mesh)}, and nothing cuts rows over it: put the transform"
                f" context_parallel into the chain, or make the mesh with cp = 1"
            )
        return self.plan_data(facts, device_mesh)

    def plan_data(self, facts: ModelFacts, device_mesh: DeviceMesh) -> Plan:
        raise NotImplementedError

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        audit.audit([ModelPart(model, plan, facts)], data_groups(device_mesh))
        return model


@register_model_transform("ddp", DDPTransformConfig)
class DDPTransform(DataTransform):
    """Whole parameters on every rank, gradients averaged by all-reduce; weights must exist, or are made first.

    Beside tensor or pipeline parallelism, where torch's DDP supports neither parts of parameters nor several
    backwards at a time, fully_shard over a shard axis of one rank does the same.
    """

    rows, broadcasts = ("weights", "ddp", "fully_shard"), True

    def layout(self) -> Layout:
        return self.context.get("layout") or Layout(dp_replicate=-1, dp_shard=1)

    def plan_data(self, facts: ModelFacts, device_mesh: DeviceMesh) -> Plan:
        meshes = [p.device_mesh for p in facts.module.parameters() if isinstance(p, DTensor)]
        if any(Axis.DP_SHARD.value in (mesh.mesh_dim_names or ()) for mesh in meshes):
            raise ConfigError(
                "ddp keeps whole parameters on every rank, and fully_shard has sharded them: leave one of the two out"
            )
        options = to_dict(self.config)
        if not (where := _beside_ddp(device_mesh)):
            plan = mean_plan(facts, device_mesh, Techniques(data_parallel="ddp"))
            return replace(plan, data=replace(plan.data, ddp_options=tuple(options.items())))
        if changed := [name for name, value in options.items() if value != getattr(DDPTransformConfig(), name)]:
            raise ConfigError(
                f"ddp: {', '.join(changed)} is about DDP's buckets, and beside {where} there are none. Leave it out."
            )
        if (n := axis_size(device_mesh, Axis.DP_SHARD)) > 1:
            words = f"ddp keeps parameters whole on every data rank, and the mesh has dp_shard = {n} beside {where}"
            raise ConfigError(f"{words}: use fully_shard, or put those ranks into dp_replicate")
        return averaging_plan(facts, device_mesh, MixedPrecisionPolicy(), Techniques(zero_stage=0))

    def device_mesh(self) -> DeviceMesh | None:
        """Return the mesh that is given, with all data ranks as replicas, as Optimus-DL's collectives have them."""
        given = super().device_mesh()
        is_sharding = axis_size(given, Axis.DP_SHARD) > 1 and not _beside_ddp(given)
        return (
            with_data_on(given, Axis.DP_REPLICATE)
            if given is not None and is_sharding and can_merge_data(given)
            else given
        )

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        groups = data_groups(device_mesh)
        if not groups:
            log.info("ddp: the mesh %s has no larger data axis: nothing to replicate", axis_sizes(device_mesh))
        if not facts.on_meta:  # as torch does: a user's weights may have come from a different seed on each rank
            for tensor in (*model.parameters(), *model.buffers()):
                for group in groups:
                    dist.broadcast(local_part(tensor).detach(), group=group, group_src=0)
        model = super().finish(model, facts, plan, device_mesh)
        if isinstance(model, DistributedDataParallel):
            model.__class__ = DDPWrappedModel
        return model


def _beside_ddp(device_mesh: DeviceMesh | None) -> str:
    """Name the axes beside which torch's DDP cannot replicate."""
    sizes = {axis.value: axis_size(device_mesh, axis) for axis in (Axis.TP, Axis.PP)}
    return " and ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)


@register_model_transform("fully_shard", FullyShardTransformConfig)
class FullyShardTransform(DataTransform):
    """Parameters, gradients and optimizer state sharded over the data axes."""

    rows = ("fully_shard", "weights")

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        c: FullyShardTransformConfig = self.config
        acts = c.mixed_precision is not None or (c.offload is not None and c.offload.cpu_offload)
        if kwargs or acts or get_world_info()[2] > 1 or not agree.alone() or any(p.is_meta for p in model.parameters()):
            return super().apply(model, **kwargs)
        log.info("fully_shard: there is one process, so there is nothing to shard")
        return equip(model if self.context.get("device") is None else model.to(self.context["device"]), None)

    def plan_data(self, facts: ModelFacts, device_mesh: DeviceMesh) -> Plan:
        c: FullyShardTransformConfig = self.config
        policy = MixedPrecisionPolicy() if c.mixed_precision is None else c.mixed_precision.policy
        requested = Techniques(
            reshard_after_forward=c.reshard_after_forward,
            sync_grad_accum=c.sync_grad_accum,
            cpu_offload=c.offload is not None and c.offload.cpu_offload,
        )
        plan = averaging_plan(facts, device_mesh, policy, requested)
        pinned = c.offload is None or c.offload.pin_memory
        own = callable(getattr(facts.module, "fully_shard", None))
        if own:
            log.info("fully_shard: %s has a fully_shard of its own, which says what is sharded together", facts.kind)
            inside = [unit for unit in plan.units if unit.name and not unit.experts and unit.name not in facts.blocks]
            if inside:
                raise UnsupportedError(
                    f"{inside[0].name} trains parameters in {inside[0].dtype} beside others of {facts.kind} in"
                    f" {plan.units[0].dtype}, and torch shards together what trains in one dtype: the model's own"
                    f" fully_shard says what that is. Convert the model to one dtype, or leave out its fully_shard."
                )
        return replace(plan, data=replace(plan.data, pin_memory=pinned and plan.data.pin_memory, own_units=own))

    def layout(self) -> Layout:
        layout = self.context.get("layout") or Layout(dp_replicate=-1, dp_shard=-1)
        is_open = layout.dp_replicate == layout.dp_shard == -1
        return replace(layout, dp_replicate=1) if is_open and not self.config.use_hybrid_sharding else layout

    def device_mesh(self) -> DeviceMesh | None:
        given = super().device_mesh()
        assert given is not None
        replicas, shards = (axis_size(given, axis) for axis in SAMPLES)
        if replicas > 1 and not self.config.use_hybrid_sharding:
            # the transform was given ranks and chooses who replicates; a given mesh has chosen already
            if self.collective is not None and can_merge_data(given):
                return with_data_on(given, Axis.DP_SHARD)
            raise ConfigError(
                f"fully_shard.use_hybrid_sharding = false shards over all data ranks, and this mesh replicates over"
                f" dp_replicate = {replicas}. Make it with dp_shard = {replicas * shards} and dp_replicate = 1, or set"
                f" use_hybrid_sharding = true."
            )
        return given


@register_model_transform("float8", Float8TransformConfig)
class Float8Transform(PlannedTransform):
    """Float8 multiplication in the linear layers of the blocks."""

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        c: Float8TransformConfig = self.config
        if c.enable_fsdp_float8_all_gather and c.recipe != "tensorwise":
            raise UnsupportedError(
                "float8.enable_fsdp_float8_all_gather = true gathers a weight with one scale, and float8.recipe ="
                f" {c.recipe} has one for each row. Use false, or recipe = tensorwise."
            )
        requested = Techniques(float8=c.recipe, float8_filter=c.filter)  # type: ignore[arg-type]
        return float8_plan(facts, requested, c.enable_fsdp_float8_all_gather)


@register_model_transform("tensor_parallel", TensorParallelTransformConfig)
class TensorParallelTransform(AxisTransform):
    """Layers, embedding and head cut over the tensor axis; gradients are complete when backward ends."""

    def requested(self) -> Techniques:
        c: TensorParallelTransformConfig = self.config
        rows = tuple(TensorStyleRequest(pattern, style) for pattern, style in c.plan.items())
        return Techniques(sequence_parallel=c.sequence_parallel, regather=c.regather, tensor_plan=rows)


@register_model_transform("expert_parallel", ExpertParallelTransformConfig)
class ExpertParallelTransform(AxisTransform):
    """Experts sharded over the expert axis; tokens travel to their experts and back."""


@register_model_transform(CONTEXT, ContextParallelTransformConfig)
class ContextParallelTransform(AxisTransform):
    """Attention that reaches the tokens of other ranks; a loop cuts rows by ``context_parallel_rows``."""

    def requested(self) -> Techniques:
        return Techniques(context_parallel_method=self.config.method)


@register_model_transform("activation_checkpoint", ActivationCheckpointTransformConfig)
class ActivationCheckpointTransform(PlannedTransform):
    """Recomputation of activations in backward."""

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        c: ActivationCheckpointTransformConfig = self.config
        if c.use_reentrant:
            raise UnsupportedError(
                "activation_checkpoint.use_reentrant = true: torch's re-entrant form breaks hooks of sharded modules."
                " Use false."
            )
        if c.ops_to_save:
            raise_all(list(check_kept(c.ops_to_save, "activation_checkpoint.ops_to_save")))
        if not c.layer_classes:
            mode = "selective_op" if c.ops_to_save else "full"
            kept = {"checkpoint_keep": tuple(c.ops_to_save), "checkpoint_keep_every": 1} if c.ops_to_save else {}
            return mean_plan(facts, device_mesh, Techniques(activation_checkpointing=mode, **kept))
        modules = [(clean(name), module) for name, module in facts.module.named_modules()]
        alone = {name for name in c.layer_classes if "." not in name}
        classes = tuple(import_classes_from_paths([path for path in c.layer_classes if path not in alone]))
        if unknown := sorted(alone - {kind.__name__ for _, module in modules for kind in type(module).__mro__}):
            near = nearest(unknown[0], {type(module).__name__ for _, module in modules})
            raise ConfigError(
                f"activation_checkpoint.layer_classes: no module of {facts.kind} is of the class '{unknown[0]}'.{near}"
            )
        chosen = tuple(
            n for n, m in modules if isinstance(m, classes) or alone & {kind.__name__ for kind in type(m).__mro__}
        )
        if not chosen:
            raise ConfigError(
                f"activation_checkpoint.layer_classes = {list(c.layer_classes)}: no module of {facts.kind} is one of"
                f" them"
            )
        made = replace(mean_plan(facts, device_mesh, Techniques()), activation_checkpointing="by class")
        return replace(made, checkpointed=chosen, checkpoint_keep=tuple(c.ops_to_save))


@register_model_transform("compile", CompileTransformConfig)
class CompileTransform(PlannedTransform):
    """torch.compile on each repeated block."""

    def requested(self) -> Techniques:
        if (budget := self.config.activation_memory_budget) is None:
            return Techniques(compile=True)
        return Techniques(compile=True, activation_checkpointing="memory_budget", activation_memory_budget=budget)

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        options = {"backend": "inductor", **self.config.compile_kwargs}
        return replace(super().plan(facts, device_mesh), compile_options=tuple(options.items()))
