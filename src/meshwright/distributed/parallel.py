"""Provide KempnerForge's path to data parallelism, recomputation, float8 and their composition."""

from .doors import ActivationCheckpointing, apply_ac, apply_float8, apply_fsdp2, build_parallel_model, default_mp_policy
from .mesh import get_dp_mesh, has_dp_mesh

__all__ = [
    "ActivationCheckpointing",
    "apply_ac",
    "apply_float8",
    "apply_fsdp2",
    "build_parallel_model",
    "default_mp_policy",
    "get_dp_mesh",
    "has_dp_mesh",
]
