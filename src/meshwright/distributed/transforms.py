"""A chain of registered model transforms, from config. Built-in ones come in THE order, whatever order the config lists them in.

Gradients are averaged over data ranks, as torch does: these transforms serve loops that bring mean losses.
"""

from .transform_options import (
    ActivationCheckpointTransformConfig,
    CompileTransformConfig,
    DDPTransformConfig,
    ExpertParallelTransformConfig,
    Float8TransformConfig,
    FullyShardTransformConfig,
    LoadWeightsTransformConfig,
    MixedPrecisionConfig,
    OffloadConfig,
    TensorParallelTransformConfig,
)
from .transform_registry import ModelTransform, apply_model_transforms, build_model_transform, register_model_transform

__all__ = [
    "ActivationCheckpointTransformConfig",
    "CompileTransformConfig",
    "DDPTransformConfig",
    "ExpertParallelTransformConfig",
    "Float8TransformConfig",
    "FullyShardTransformConfig",
    "LoadWeightsTransformConfig",
    "MixedPrecisionConfig",
    "ModelTransform",
    "OffloadConfig",
    "TensorParallelTransformConfig",
    "apply_model_transforms",
    "build_model_transform",
    "register_model_transform",
]
