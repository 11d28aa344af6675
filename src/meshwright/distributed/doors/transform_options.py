"""Define the options of the built-in transforms, under the names that their users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.core.dtypes import canonical_dtype, torch_dtype


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
    """How attention reaches the tokens of other ranks of the mesh's cp axis.

    ``method``: auto, all_gather, ring, ulysses, ulysses_ring or halo.
    """

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
