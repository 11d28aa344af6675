"""Meshwright."""

from __future__ import annotations

import torch

from .problem import ROWS, Question

PACKAGES = ["meshwright[hf]"]
LAYOUTS = {
    "zero3": ({"dp_shard": 2}, {"zero_stage": 3}),
    "zero2": ({"dp_shard": 2}, {"zero_stage": 2}),
    "ddp": ({"dp_replicate": 2}, {}),
    "tensor": ({"tp": 2}, {"sequence_parallel": False}),
    "sequence": ({"tp": 2}, {"sequence_parallel": True}),
    "pipeline": ({"pp": 2}, {}),
    "context": ({"cp": 2}, {}),
}


def build(question: Question):
    from meshwright import Layout, parallelize

    sizes, techniques = LAYOUTS[question.layout]
    if question.recomputes:
        techniques = techniques | {"activation_checkpointing": "full"}
    techniques = techniques | {"precision": {"compute": "float32"}}
    built = question.model()
    if question.recomputes:
        built.gradient_checkpointing_disable()
    share = ROWS if question.cuts_rows else ROWS * question.world  # of a microbatch, as the others cut it
    rows = share if question.microbatches > 1 else 0
    model = parallelize(built, Layout(**sizes), techniques=techniques, microbatch_rows=rows)
    optimizer = question.optimizer(model.parameters())

    def step(parts) -> float:
        batch = parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        loss = model.forward_backward(batch)
        model.optimizer_step(optimizer, max_norm=question.max_norm)
        return float(loss)

    return step
