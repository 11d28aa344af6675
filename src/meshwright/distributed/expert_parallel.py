"""Offer expert parallelism at KempnerForge's path."""

from .doors.functions import apply_expert_parallel
from .mesh import get_ep_mesh

__all__ = ["apply_expert_parallel", "get_ep_mesh"]
