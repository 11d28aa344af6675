"""Chain registered model transforms from config; built-in ones apply in the fixed order, in any order of config.

Gradients are averaged over data ranks, as in torch: these transforms serve loops that bring mean losses.
"""

from .doors.builtin_transforms import (
    ActivationCheckpointTransform,
    ActivationCheckpointTransformConfig,
    CompileTransform,
    CompileTransformConfig,
    ContextParallelTransform,
    ContextParallelTransformConfig,
    DDPTransform,
    DDPTransformConfig,
    ExpertParallelTransform,
    ExpertParallelTransformConfig,
    Float8Transform,
    Float8TransformConfig,
    FullyShardTransform,
    FullyShardTransformConfig,
    LoadWeightsTransformConfig,
    MixedPrecisionConfig,
    ModelTransformConfig,
    OffloadConfig,
    TensorParallelTransform,
    TensorParallelTransformConfig,
)
from .doors.transform_registry import (
    BaseDistributedTransform,
    DDPWrappedModel,
    ModelTransform,
    apply_model_transforms,
    build_model_transform,
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
