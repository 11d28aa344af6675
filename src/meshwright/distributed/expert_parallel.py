"""Provide expert parallelism under KempnerForge's path (from ``functions`` and ``mesh``)."""

from .doors import apply_expert_parallel
from .mesh import get_ep_mesh

__all__ = ["apply_expert_parallel", "get_ep_mesh"]
