"""Tensor parallelism by KempnerForge's path: ``apply_tensor_parallel`` of functions, ``get_tp_mesh`` of mesh."""

from .doors.functions import apply_tensor_parallel
from .mesh import get_tp_mesh

__all__ = ["apply_tensor_parallel", "get_tp_mesh"]
