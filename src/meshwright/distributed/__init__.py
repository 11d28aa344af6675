"""Build meshes, and lay a model onto them by one function per technique.

These functions keep torch's averaging of gradients over data ranks, because their users bring mean losses;
``meshwright.parallelize`` sums a loss that is divided by the global token count already.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from meshwright.core.host import refuse_older

refuse_older("torch")

_HOME = {
    "doors": (
        "ActivationCheckpointing",
        "apply_ac",
        "apply_context_parallel",
        "apply_expert_parallel",
        "apply_float8",
        "apply_fsdp2",
        "apply_tensor_parallel",
        "build_parallel_model",
        "default_mp_policy",
    ),
    "context.context_parallel": ("context_parallel_rows",),
    "optimizer.grad_clip": ("clip_grad_norm_",),
    "mesh": (
        "get_cp_mesh",
        "get_dp_mesh",
        "get_ep_mesh",
        "get_fsdp_mesh",
        "get_pp_mesh",
        "get_pp_rank",
        "get_pp_size",
        "get_tp_mesh",
        "has_dp_mesh",
    ),
    "pipeline_parallel": (
        "PipelineStageModule",
        "build_pipeline_schedule",
        "build_pipeline_stage",
        "build_stage_module",
        "compute_layer_assignment",
    ),
    "setup": ("DistributedConfig", "destroy_distributed", "init_distributed"),
    "process.world": ("get_world_info", "is_rank_zero"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        if _WHERE[name] != "process.world":  # which needs no torch
            _refuse_unfit()
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _refuse_unfit() -> None:
    from meshwright.distributed.process.world import refuse_without_distributed

    refuse_without_distributed()


if "torch" in sys.modules:  # of the launcher of local workers, which has no torch, each worker asks
    _refuse_unfit()
