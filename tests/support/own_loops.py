"""Training loops of users' own, with rows cut over ranks, and one process with plain torch to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.losses import IGNORED
from meshwright.core.names import clean
from meshwright.distributed import context_parallel_rows
from meshwright.distributed.mesh import data_position
from meshwright.introspection.signature import logits_of

Batch = dict[str, Tensor]


def batch_of(vocabulary: int, rows: int = 4, length: int = 24, *, key: str = "tokens") -> Batch:
    """Token ids, and labels that are shifted: the last token of a row has none, so that ranks have other counts."""
    tokens = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), IGNORED)), dim=1)
    return {key: tokens, "labels": labels}


def whole_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Gradients of the mean loss over all labels, by plain torch."""
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False  # with a cache, transformers does not look for documents in positions
    loss = F.cross_entropy(logits_of(model(**inputs)).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def own_rows_of(mesh: Any, batch: Batch) -> Batch:
    rank, ranks = data_position(mesh)
    rows = len(batch["labels"]) // ranks
    return {key: value[rank * rows : (rank + 1) * rows] for key, value in batch.items()}


def by_sum(own: Tensor, labels: Tensor, ranks: int, total: int) -> Tensor:
    """The loss that FSDP's mean over ranks makes the mean over all labels, however many a rank has."""
    return F.cross_entropy(own.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") * ranks / total


def by_mean(own: Tensor, labels: Tensor, ranks: int, total: int) -> Tensor:
    return F.cross_entropy(own.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def step(
    model: nn.Module,
    mesh: Any,
    batch: Batch,
    loss_of: Callable[..., Tensor] = by_sum,
    *,
    inside: bool = True,
    ranks: int = 0,
) -> float:
    """Forward and backward of this rank's rows; ``inside``: the backward runs inside the block too."""
    mine = own_rows_of(mesh, batch)
    counts = torch.tensor(0)
    with context_parallel_rows(model, mine) as own:
        labels = own.pop("labels")
        counts = (labels != IGNORED).sum()
        tensor_ranks = mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
        dist.all_reduce(counts)
        total = int(counts) // tensor_ranks
        loss = loss_of(logits_of(model(**own)), labels, ranks or dist.get_world_size() // tensor_ranks, total)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return float(loss.detach())


def worst(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """Largest relative error of the gradients; collective where they lie in parts."""
    errors = []
    for raw, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        name = clean(raw).removeprefix("module.")
        assert whole is not None, name
        scale = max(float(expected[name].norm()), 1e-6)
        errors.append(float((whole - expected[name]).norm()) / scale)
    return max(errors)
