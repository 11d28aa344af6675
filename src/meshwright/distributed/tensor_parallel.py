"""Provide tensor parallelism under KempnerForge's path (from ``functions`` and ``mesh``)."""

from .doors import apply_tensor_parallel
from .mesh import get_tp_mesh

__all__ = ["apply_tensor_parallel", "get_tp_mesh"]
