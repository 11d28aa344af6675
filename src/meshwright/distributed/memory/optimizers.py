"""Make the optimizer of a dry run, with the state of one that has stepped before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.core.dtypes import dtype_bytes
from meshwright.distributed.optimizer.classes import optimizer_class
from meshwright.distributed.optimizer.muon import Muon
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.torch_private import local_part
from meshwright.planning.optimizer.plan import OptimizerPlan

BuildOptimizer = Callable[[ParallelModel], torch.optim.Optimizer]


class LowBitStates(torch.optim.Optimizer):
    """Holds as many bytes as torchao's optimizer, whose compiled step cannot be run on fake tensors."""

    def __init__(self, parameters: list[torch.nn.Parameter], plan: OptimizerPlan, master: str):
        super().__init__(parameters, {})
        self._plan, self._bytes = plan, dtype_bytes(master)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            elements = local_part(parameter).numel()
            size = len(self._plan.row.state) * elements * self._bytes
            if self._plan.rounds(elements):
                size = self._plan.bytes_of_rounded(elements, 1)
            if not self.state[parameter]:
                self.state[parameter] = {"moments": torch.empty(size, dtype=torch.uint8)}


def default_optimizer(model: ParallelModel) -> torch.optim.Optimizer:
    """Make an optimizer of the plan's kind, with torch's default implementation."""
    plan = model.plan.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if plan.needs_torchao:
        return LowBitStates(trained, plan, model.plan.precision.master)
    if plan.row.by_role:
        return Muon(split_by_role([{"params": trained}], model.named_parameters(), plan.matrices), lr=1e-3)
    return optimizer_class(plan.row)(trained, lr=1e-3)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, by a step with gradients of zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
