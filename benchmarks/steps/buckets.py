"""Note the messages of DDP's reducer, which is C++ and reads addresses that tensors without memory do not have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planning.plan import Plan

from .operators import OperatorKind, OperatorWork, Phase
from .recorder import StepRecorder

MIB = 2**20
FIRST, OTHERS = MIB, 25 * MIB
"""Bytes at which DDP closes its first bucket and later ones, by default."""


def reduce_in_buckets(model: nn.Module, plan: Plan, microbatches: int, recorder: StepRecorder) -> _Reducer:
    """Let gradients be copied into buckets as they come, and each full bucket begin its all-reduce, as DDP does.

    Args:
        plan: the plan of the run, with data parallelism by DDP.
        microbatches: backwards of a step.
    """
    asked = dict(plan.data.ddp_options).get("bucket_cap_mb")
    limits = (FIRST, OTHERS) if asked is None else (int(asked * MIB), int(asked * MIB))
    reducer = _Reducer(recorder, limits, sum(p.requires_grad for p in model.parameters()))
    syncs = plan.data.sync_grad_accum is True
    done: Counter[int] = Counter()
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):

        def ready(tensor: Tensor, number: int = number) -> None:
            done[number] += 1
            if syncs or done[number] % microbatches == 0:
                reducer.add(tensor)

        parameter.register_post_accumulate_grad_hook(ready)
    return reducer


@dataclass
class _Reducer:
    """The buckets of a backward: gradients in the order in which they are ready."""

    recorder: StepRecorder
    limits: tuple[int, int]
    gradients: int
    filled: int = 0
    seen: int = 0
    begun: list[int] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.recorder.events.append(OperatorWork("ddp.copy", OperatorKind.INPLACE, Phase.BACKWARD, 2.0 * size))
        self.filled, self.seen = self.filled + size, self.seen + 1
        if self.filled >= self.limits[bool(self.begun)] or self.seen == self.gradients:
            ranks = tuple(sorted(dist.get_process_group_ranks(dist.group.WORLD)))  # type: ignore[arg-type]
            self.begun.append(self.recorder.begin("all_reduce", ranks, float(self.filled)))
            self.filled = 0
        if self.seen == self.gradients:
            for number in self.begun:
                self.recorder.wait(number)
            self.begun, self.seen = [], 0
