"""Provide clipping and ranks under KempnerForge's path (from ``grad_clip`` and ``world``)."""

from .optimizer.grad_clip import clip_grad_norm_
from .process.world import get_world_info, is_rank_zero

__all__ = ["clip_grad_norm_", "get_world_info", "is_rank_zero"]
