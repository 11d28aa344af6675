"""NeMo AutoModel: ``fsdp2_strategy_parallelize`` on its mesh of three axes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .bare import loop
from .problem import TOKENS, Question

PACKAGES = ["nemo-automodel"]


def build(question: Question):
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize

    tensor = question.layout in ("tensor", "sequence")
    if not tensor and question.layout not in ("zero3", "zero2"):
        raise NotImplementedError(f"no {question.layout} in fsdp2_strategy_parallelize")
    sizes = (1, 1, question.world) if tensor else (1, question.world, 1)
    mesh = init_device_mesh(question.device, sizes, mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    model = question.model()
    if question.recomputes:
        model.gradient_checkpointing_disable()
    model = fsdp2_strategy_parallelize(
        model,
        mesh,
        mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32),
        sequence_parallel=question.layout == "sequence",
        activation_checkpointing=question.recomputes,
        reshard_after_forward=question.layout == "zero3",
    )
    positions = torch.arange(TOKENS, device=question.device)[None] if question.layout == "sequence" else None

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        found = model(input_ids=tokens, position_ids=positions).logits
        return found.full_tensor() if isinstance(found, DTensor) else found  # its plan leaves them cut

    return loop(question, model, logits)
