"""Expert parallelism by KempnerForge's path: ``apply_expert_parallel`` of functions, ``get_ep_mesh`` of mesh."""

from .doors.functions import apply_expert_parallel
from .mesh import get_ep_mesh

__all__ = ["apply_expert_parallel", "get_ep_mesh"]
