"""Share parameters between the first and the last stage, such as a tied embedding.

Each of the two stages has its own copy. Both start with the same values and get the sum of both gradients, so they stay
equal to the last bit, and so do their optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.distributed.step.part import ModelPart
from meshwright.distributed.torch_private import local_part
from meshwright.planning.pipeline.plan import PipelinePlan


class Ties:
    """The tied parameters of this rank's stages."""

    def __init__(self, parts: Sequence[ModelPart], plan: PipelinePlan, group: dist.ProcessGroup):
        self.group = group
        by_stage = {part.stage: part.module for part in parts}
        self.first_rank, self.last_rank = plan.stages[0].rank, plan.stages[-1].rank
        self._modules = by_stage.get(0), by_stage.get(len(plan.stages) - 1)
        self._names = plan.tied

    @property
    def pairs(self) -> list[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """The shared parameters on the first and on the last stage; None if that stage is on another rank."""
        first, last = self._modules
        if first is None and last is None:
            return []
        return [(first and first.get_parameter(one), last and last.get_parameter(other)) for one, other in self._names]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the values of the first stage to the last."""
        for first, last in self.pairs:
            if first is not None and last is not None:
                _local(last).copy_(_local(first))
            elif first is not None:
                dist.send(_local(first).contiguous(), group=self.group, group_dst=self.last_rank)
            elif last is not None:
                room = torch.empty_like(_local(last), memory_format=torch.contiguous_format)
                dist.recv(room, group=self.group, group_src=self.first_rank)
                _local(last).copy_(room)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Sum over both stages, on exit, the shared gradients that the step inside adds."""
        held = [p for pair in self.pairs for p in pair if p is not None and p.requires_grad]
        before = [p.grad for p in held]
        for parameter in held:
            parameter.grad = None
        yield
        with torch.no_grad():
            for first, last in self.pairs:
                if any(p is not None and p.requires_grad for p in (first, last)):
                    self._sum(first, last)
        for parameter, earlier in zip(held, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _sum(self, first: nn.Parameter | None, last: nn.Parameter | None) -> None:
        if first is not None and last is not None:
            total = _local(_gradient(first)).add_(_local(_gradient(last)))
            _local(_gradient(last)).copy_(total)
            return
        mine, peer = (first, self.last_rank) if first is not None else (last, self.first_rank)
        assert mine is not None
        own = _local(_gradient(mine))
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        sides = [
            dist.P2POp(dist.isend, own.contiguous(), group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(sides):
            work.wait()
        own.add_(other)  # a + b is b + a to the last bit


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; make it zeros if the stage computed none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
