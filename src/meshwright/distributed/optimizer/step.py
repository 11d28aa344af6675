"""Step an optimizer by its plan: of the requested kind, with its state in the requested memory."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import ConfigError
from meshwright.planning.optimizer.plan import OptimizerPlan

from . import rehearsal as optimizer_rehearsal
from . import state_offload
from .muon import Muon
from .torchao_adamw import TorchaoAdamW


def step(
    optimizer: torch.optim.Optimizer, plan: OptimizerPlan, device: torch.device, mesh: DeviceMesh | None = None
) -> None:
    """Step an optimizer whose gradients are ready.

    Args:
        mesh: the model's, over whose ranks an optimizer of whole matrices shares them out.

    Raises:
        ConfigError: the optimizer differs from the plan.
        UnsupportedError: its state cannot come by portions, or it updates sharded parameters unlike whole ones.
    """
    check(optimizer, plan)
    if isinstance(optimizer, Muon):
        optimizer.share_out(mesh)
    elif not optimizer_rehearsal.is_ours(optimizer):
        optimizer_rehearsal.refuse_unequal(optimizer)
    if plan.in_host_memory:
        state_offload.step(optimizer, device)
    else:
        optimizer.step()


def check(optimizer: torch.optim.Optimizer, plan: OptimizerPlan) -> None:
    """Raise ConfigError if an optimizer stores its state or rounds otherwise than planned."""
    kind = type(optimizer).__name__
    have = (optimizer.state_word, optimizer.stochastic) if isinstance(optimizer, TorchaoAdamW) else ("full", False)
    if have != (plan.state, plan.stochastic_rounding):
        planned = (
            f"techniques.optimizer_state = {plan.state}, techniques.stochastic_rounding ="
            f" {str(plan.stochastic_rounding).lower()}"
        )
        raise ConfigError(
            f"optimizer: the model was laid out with {planned}, and this {kind} would do otherwise. Make it with"
            f" meshwright.training.optim.build.make_optimizer(groups, lr=…, plan=model.plan.optimizer,"
            f" named_parameters=model.named_parameters())."
        )
