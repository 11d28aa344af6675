"""Models of one's own with rows cut over ranks, in several ways, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize
from meshwright.distributed.mesh import data_position

EXACT = 1e-10
FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
WAYS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "cp": (2, {"cp": 2, "dp_shard": 1}, {}),
    "cp, recomputed": (2, {"cp": 2, "dp_shard": 1}, {"activation_checkpointing": "full"}),
    "dp_shard and cp": (4, {"cp": 2, "dp_shard": 2}, {}),
    "tp and cp": (4, {"cp": 2, "tp": 2, "dp_shard": 1}, {"sequence_parallel": False}),
    "cp, compiled": (2, {"cp": 2, "dp_shard": 1}, {"compile": True, "compile_backend": "eager"}),
    "pp and cp": (4, {"cp": 2, "pp": 2, "dp_shard": 1}, {}),
}


def batch(length: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 40, (4, length + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def errors(
    build: Callable[[], nn.Module],
    sizes: dict[str, int],
    techniques: dict[str, Any],
    length: int,
    more: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """Return the relative errors of the loss and of each gradient, on one rank of a layout.

    Args:
        more: other keys of the batch.
    """
    reference, given = build(), batch(length) | (more or {})
    inputs = {key: value for key, value in given.items() if key != "labels"}
    loss = F.cross_entropy(reference(**inputs).flatten(0, 1), given["labels"].flatten())
    loss.backward()
    expected = {"loss": loss.detach()} | {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    model = parallelize(build(), Layout(**sizes), techniques=FP64 | techniques)
    rank, ranks = data_position(model.mesh)
    found = {"loss": model.forward_backward({k: v.chunk(ranks)[rank] for k, v in given.items()}).loss}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return {n: float((v - expected[n]).norm() / expected[n].norm().clamp(min=1e-9)) for n, v in found.items()}
