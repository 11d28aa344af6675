"""Build torch's own pipeline objects around stages of meshwright's decoder, under KempnerForge's path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError
from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.plan import compute_layer_assignment

from .mesh import axis_sizes, get_pp_mesh, get_pp_rank, get_pp_size, refuse_rows_of_stages
from .pipeline.stage_module import PipelineStageModule, build_stage_module
from .torch_private import mixed_precision_of

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

LossFunction = Callable[[Tensor, Any], Tensor]
"""(output of the last stage, target) -> 0-dim loss of a microbatch."""
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""Names of schedules: meshwright's -> torch's."""


def build_pipeline_stage(
    stage_module: PipelineStageModule,
    device_mesh: DeviceMesh,
    device: torch.device | str,
    batch_size: int,
    seq_len: int,
    param_dtype: torch.dtype = torch.bfloat16,
) -> PipelineStage:
    """Build torch's stage around a stage module, with static shapes: no inference pass before the first step.

    Args:
        batch_size: rows of a microbatch.
        seq_len: tokens of a row.
        param_dtype: dtype of hidden states, in which the stage computes.

    Raises:
        ConfigError: the mesh lacks a pp axis, or the stage computes in another dtype, or takes no such sequences.
        UnsupportedError: the mesh has a cp axis larger than 1.
    """
    if Axis.PP.value not in axis_sizes(device_mesh):
        raise ConfigError(f"a pipeline stage needs a mesh axis named pp; the mesh has {tuple(axis_sizes(device_mesh))}")
    computed = next(stage_module.parameters()).dtype
    if isinstance(stage_module, FSDPModule) and (policy := mixed_precision_of(stage_module)) is not None:
        computed = policy.output_dtype or policy.param_dtype or computed
    if computed != param_dtype:
        raise ConfigError(
            f"param_dtype = {param_dtype}, but the stage computes in {computed}, and ranks that expect messages of"
            f" other sizes abort or hang: give param_dtype={computed}, or shard the stage first with apply_fsdp2 and a"
            f" policy that computes in {param_dtype}"
        )
    if seq_len > stage_module.config.max_seq_len:
        raise ConfigError(
            f"seq_len = {seq_len} is longer than the model's max_seq_len = {stage_module.config.max_seq_len}"
        )
    refuse_rows_of_stages(device_mesh)
    stage_module.pipeline_group = device_mesh.get_group(Axis.PP.value)
    config, hidden = stage_module.config, (batch_size, seq_len, stage_module.config.dim)
    between = torch.empty(hidden, device="meta", dtype=param_dtype, requires_grad=True)
    tokens = torch.empty(hidden[:2], device="meta", dtype=torch.int64)
    logits = torch.empty((*hidden[:2], config.vocab_size), device="meta", dtype=param_dtype, requires_grad=True)
    return PipelineStage(
        stage_module,
        stage_module.stage_id,
        stage_module.num_stages,
        torch.device(device),
        input_args=(tokens if stage_module.is_first else between,),
        output_args=(logits if stage_module.is_last else between,),
        group=stage_module.pipeline_group,
    )


def build_pipeline_schedule(
    stage: PipelineStage | Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: LossFunction | None,
    schedule: str = "1f1b",
    scale_grads: bool = True,
) -> Any:
    """Build torch's schedule by meshwright's or torch's name, with ``step()`` and ``eval()``.

    Args:
        stage: this rank's stage, or the list of its stages for schedules with several on a rank.
        scale_grads: divide gradients by the number of microbatches, as in torch.

    Raises:
        ConfigError: an unknown name, one stage where several are needed or vice versa, or too few microbatches.
    """
    kind = schedule_kind(schedule)
    made = get_schedule_class(NAMES[kind.name])
    stages = [stage] if isinstance(stage, PipelineStage) else list(stage)
    ranks = stages[0].group_size
    needed = ranks if kind.name == "1f1b" else 1  # torch's keeps every stage busy before its first backward
    if (legal := kind.legal(max(n_microbatches, needed), ranks)) != n_microbatches:
        raise ConfigError(f"{kind.name} on {ranks} ranks takes {legal} microbatches or more, not {n_microbatches}")
    if issubclass(made, PipelineScheduleSingle):
        if len(stages) > 1:
            words = f"{kind.name} has one stage on each rank, and {len(stages)} were given"
            raise ConfigError(f"{words}: use interleaved_1f1b for several")
        return made(stages[0], n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
    if isinstance(stage, PipelineStage):
        raise ConfigError(
            f"{kind.name} has several stages on each rank: give the list of them, such as"
            f" [build_pipeline_stage(...) for each of this rank's stage modules]"
        )
    return made(stages, n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
