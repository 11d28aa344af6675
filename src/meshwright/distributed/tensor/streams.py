"""Random numbers where the sequence is cut: before the blocks all ranks of the tensor axis draw alike, inside each draws its own.

A rank's own stream is a function of a number that all draw and of its rank, so there is no state besides torch's to be saved or restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.distributed.random_streams import restore_streams, streams
from meshwright.distributed.shards import seed_of

from .runtime import Runtime


def separate_streams(model: nn.Module, first_block: nn.Module, runtime: Runtime) -> None:
    """From the first block to the end of the forward, in training mode, each rank draws from a stream of its own."""
    shared: list[dict[str, torch.Tensor]] = []

    def enter(_: nn.Module, args: tuple) -> None:
        if model.training and runtime.sequence.cut and not shared:
            number = int(torch.randint(2**62, (1,)))
            shared.append(streams())
            torch.manual_seed(seed_of("tensor rank", number, runtime.group.rank))

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        if shared:
            restore_streams(shared.pop())

    first_block.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
