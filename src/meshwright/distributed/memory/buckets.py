"""Keep gradients where DDP would keep them: its reducer, in C++, reads addresses that fake tensors do not have."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from meshwright.core.record import remember
from meshwright.distributed.data.replicated import GradientBuckets

from .live import storage_of


def keep_in_buckets(model: nn.Module, microbatches: int, *, syncs: bool) -> None:
    """Allocate a gradient for each trained parameter now, and move gradients there as DDP does.

    Args:
        microbatches: backwards of a step; gradients accumulate elsewhere until the last one.
        syncs: whether each backward reduces, and so moves, its gradients.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buckets = GradientBuckets(None)
    remember(model, buckets)
    done: Counter[int] = Counter()
    for number, parameter in enumerate(trained):
        bucket = torch.empty_like(parameter, requires_grad=False)
        buckets.note(storage_of(bucket))

        def move(tensor: Tensor, number: int = number, bucket: Tensor = bucket) -> None:
            done[number] += 1
            if syncs or done[number] % microbatches == 0:
                tensor.grad = bucket

        parameter.register_post_accumulate_grad_hook(move)
