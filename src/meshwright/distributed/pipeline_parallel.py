"""Provide pipeline parallelism for users' own loops under KempnerForge's path (from ``mesh`` and ``doors``)."""

from .doors.stage_module import (
    PipelineStageModule,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    compute_layer_assignment,
)
from .mesh import get_pp_mesh, get_pp_rank, get_pp_size

__all__ = [
    "PipelineStageModule",
    "build_pipeline_schedule",
    "build_pipeline_stage",
    "build_stage_module",
    "compute_layer_assignment",
    "get_pp_mesh",
    "get_pp_rank",
    "get_pp_size",
]
