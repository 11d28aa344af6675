"""The built-in transforms: each technique under its registered name, with the option names that its users know."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.core.axes import Axis
from meshwright.core.dtypes import canonical_dtype, torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.imports import import_classes_from_paths
from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Techniques, TensorStyleWish

from . import audit, order
from .functions import averaging_plan, proven_tensor_plan
from .mesh import axis_sizes, build_mesh, data_groups
from .parallelize import single_process_mesh
from .setup import DEFAULT_BACKEND, choose_backend
from .transform_registry import ModelTransform, equip, register_model_transform
from .world import get_world_info, ranks_per_node

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class DDPTransformConfig:
    """torch's DistributedDataParallel options of the same names."""

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """dtype names: float32/fp32, float16/fp16/half, bfloat16/bf16, float64/double."""

    param_dtype: str
    reduce_dtype: str
    output_dtype: str | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, key) is not None:
                canonical_dtype(getattr(self, key), where=f"mixed_precision.{key}")

    @property
    def policy(self) -> MixedPrecisionPolicy:
        output = None if self.output_dtype is None else torch_dtype(self.output_dtype)
        return MixedPrecisionPolicy(torch_dtype(self.param_dtype), torch_dtype(self.reduce_dtype), output, self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadConfig:
    """Parameters, gradients and optimizer state in host memory; ``pin_memory`` where there is a GPU to copy to."""

    cpu_offload: bool = False
    pin_memory: bool = True


@dataclass(frozen=True)
class FullyShardTransformConfig:
    """FSDP2 / HSDP.

    ``use_hybrid_sharding`` shards inside a node and replicates across nodes where the layout left both sizes open; false shards
    over all. ``sync_grad_accum``: gradients travel with every microbatch; "shard" reduce-scatters each and postpones only the
    all-reduce over replicas.
    """

    reshard_after_forward: bool | int = False
    mixed_precision: MixedPrecisionConfig | None = None
    offload: OffloadConfig | None = None
    use_hybrid_sharding: bool = True
    sync_grad_accum: bool | Literal["shard"] = False


@dataclass(frozen=True)
class TensorParallelTransformConfig:
    """Weights cut over the mesh's tp axis.

    ``sequence_parallel``: between blocks each rank has its part of the sequence. ``regather``: gathered activations are gathered again in
    backward, and not kept. ``plan``: module pattern -> style in the words of transformers; empty: as measured.
    """

    sequence_parallel: bool = True
    regather: bool = True
    plan: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationCheckpointTransformConfig:
    """Recompute every module of the given classes ("package.module.Class"); none given: every repeated block."""

    layer_classes: tuple[str, ...] = ()
    use_reentrant: bool = False
    ops_to_save: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompileTransformConfig:
    """Options of torch.compile, applied to each repeated block."""

    compile_kwargs: dict[str, Any] = field(default_factory=dict)
    activation_memory_budget: float | None = None


@dataclass(frozen=True)
class LoadWeightsTransformConfig:
    """``checkpoint_path``: a folder of Hugging Face with safetensors, or a checkpoint of meshwright (of which the model is read).

    ``skip_on_restart``: do nothing where a run is taken up again, whose own checkpoint will be loaded instead.
    """

    checkpoint_path: str
    skip_on_restart: bool = False


class _Planned(ModelTransform):
    """A transform that makes a plan and applies some rows of the order."""

    rows: tuple[str, ...]

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        raise NotImplementedError

    def apply(self, model: nn.Module) -> nn.Module:
        facts = model_facts(model)
        device_mesh = self.device_mesh()
        plan = self.plan(facts, device_mesh)
        site = order.Site(device_mesh, facts, self.context.get("seed", 0))
        return equip(self.finish(order.apply(model, plan, site, only=self.rows), facts, plan, device_mesh), plan)

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        """What is left to do when the plan has been applied."""
        return model

    def device_mesh(self) -> DeviceMesh | None:
        return self.context.get("device_mesh")

    def wished(self, facts: ModelFacts, device_mesh: DeviceMesh | None, wishes: Techniques) -> Plan:
        device = device_mesh.device_type if device_mesh is not None else "cpu"
        return plan_for_mesh_sizes(facts, axis_sizes(device_mesh), device, wishes, "mean")


def mesh_of_world(layout: Layout) -> DeviceMesh:
    """The mesh of a layout over all processes.

    Raises:
        ConfigError: the layout does not fit the world, or the world has several processes and no process group yet.
    """
    device_type = choose_backend(DEFAULT_BACKEND)[1]
    if dist.is_initialized():
        return build_mesh(layout.resolve(dist.get_world_size(), ranks_per_node=ranks_per_node() or None), device_type)
    if (world := get_world_info()[2]) > 1:
        raise ConfigError(
            f"there are {world} processes and no process group: call init_distributed before the transforms, or give them device_mesh="
        )
    layout.resolve(world)
    return single_process_mesh(device_type)


@register_model_transform("ddp", DDPTransformConfig)
class DDPTransform(_Planned):
    """Whole parameters on every rank, gradients averaged by all-reduce. Weights must exist, or are made first."""

    rows = ("weights", "ddp")

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        plan = self.wished(facts, device_mesh, Techniques(data_parallel="ddp"))
        return replace(plan, data=replace(plan.data, ddp_options=tuple(vars(self.config).items())))

    def device_mesh(self) -> DeviceMesh | None:
        given = super().device_mesh()
        return given if given is not None else mesh_of_world(self.context.get("layout") or Layout(dp_replicate=-1, dp_shard=1))

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        groups = data_groups(device_mesh)
        if not groups:
            log.info("ddp: the mesh %s has no data axis larger than 1, so there is nothing to replicate", axis_sizes(device_mesh))
        if not facts.on_meta:  # as torch does: a user's weights may have come from a different seed on each rank
            for tensor in (*model.parameters(), *model.buffers()):
                for group in groups:
                    dist.broadcast(tensor.detach(), group=group, group_src=0)
        audit.audit(model, facts, plan, groups)
        return model


@register_model_transform("fully_shard", FullyShardTransformConfig)
class FullyShardTransform(_Planned):
    """Parameters, gradients and optimizer state sharded over the data axes."""

    rows = ("fully_shard", "weights")

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        assert device_mesh is not None
        c: FullyShardTransformConfig = self.config
        policy = MixedPrecisionPolicy() if c.mixed_precision is None else c.mixed_precision.policy
        wishes = Techniques(
            reshard_after_forward=c.reshard_after_forward,
            sync_grad_accum=c.sync_grad_accum,
            cpu_offload=c.offload is not None and c.offload.cpu_offload,
        )
        plan = averaging_plan(facts, device_mesh, policy, wishes)
        pinned = c.offload is None or c.offload.pin_memory
        return replace(plan, data=replace(plan.data, pin_memory=pinned and plan.device == "cuda"))

    def device_mesh(self) -> DeviceMesh | None:
        given = super().device_mesh()
        if given is not None:
            return given
        layout = self.context.get("layout") or Layout(dp_replicate=-1, dp_shard=-1)
        if layout.dp_replicate == layout.dp_shard == -1 and not self.config.use_hybrid_sharding:
            layout = replace(layout, dp_replicate=1)
        return mesh_of_world(layout)

    def finish(self, model: nn.Module, facts: ModelFacts, plan: Plan, device_mesh: DeviceMesh | None) -> nn.Module:
        audit.audit(model, facts, plan, data_groups(device_mesh))
        return model


@register_model_transform("tensor_parallel", TensorParallelTransformConfig)
class TensorParallelTransform(_Planned):
    """Layers, embedding and head cut over the tensor axis; gradients are right when backward ends."""

    rows = ("tensor_parallel",)

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        c: TensorParallelTransformConfig = self.config
        if axis_sizes(device_mesh).get(Axis.TP.value, 1) == 1:
            log.info("tensor_parallel: the mesh %s has no tp axis larger than 1, so there is nothing to cut", axis_sizes(device_mesh))
        rows = tuple(TensorStyleWish(pattern, style) for pattern, style in c.plan.items())
        wishes = Techniques(sequence_parallel=c.sequence_parallel, regather=c.regather, tensor_plan=rows)
        return proven_tensor_plan(facts, device_mesh, wishes)

    def device_mesh(self) -> DeviceMesh | None:
        given = super().device_mesh()
        return mesh_of_world(self.context["layout"]) if given is None and self.context.get("layout") else given


@register_model_transform("activation_checkpoint", ActivationCheckpointTransformConfig)
class ActivationCheckpointTransform(_Planned):
    """Recompute activations in backward."""

    rows = ("activation_checkpoint",)

    def apply(self, model: nn.Module) -> nn.Module:
        self._modules = [(clean(name), module) for name, module in model.named_modules()]
        return super().apply(model)

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        c: ActivationCheckpointTransformConfig = self.config
        if c.use_reentrant:
            raise UnsupportedError(
                "activation_checkpoint.use_reentrant = true: torch's re-entrant form breaks hooks of sharded modules. Use false."
            )
        if c.ops_to_save:
            raise UnsupportedError("activation_checkpoint.ops_to_save: a policy per operator is not in this version. Leave it empty.")
        if not c.layer_classes:
            return self.wished(facts, device_mesh, Techniques(activation_checkpointing="full"))
        classes = tuple(import_classes_from_paths(list(c.layer_classes)))
        chosen = tuple(name for name, module in self._modules if isinstance(module, classes))
        if not chosen:
            raise ConfigError(f"activation_checkpoint.layer_classes = {list(c.layer_classes)}: no module of {facts.kind} is one of them")
        return replace(self.wished(facts, device_mesh, Techniques()), checkpointed=chosen, activation_checkpointing="by class")


@register_model_transform("compile", CompileTransformConfig)
class CompileTransform(_Planned):
    """torch.compile on each repeated block."""

    rows = ("compile",)

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        c: CompileTransformConfig = self.config
        if c.activation_memory_budget is not None:
            raise UnsupportedError("compile.activation_memory_budget is not in this version. Leave it out, or use activation_checkpoint.")
        plan = self.wished(facts, device_mesh, Techniques(compile=True))
        return replace(plan, compile_options=tuple({"backend": "inductor", **c.compile_kwargs}.items()))
