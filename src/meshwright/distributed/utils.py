"""Offer clipping and ranks at KempnerForge's path."""

from .optimizer.grad_clip import clip_grad_norm_
from .process.world import get_world_info, is_rank_zero

__all__ = ["clip_grad_norm_", "get_world_info", "is_rank_zero"]
