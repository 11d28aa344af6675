"""Find the class of an optimizer's row: torch's, or ours where torch has none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.distributed.averaging.schedule_free import ScheduleFreeAdamW
from meshwright.planning.optimizer.kinds import OptimizerKind

from .adafactor import Adafactor
from .lion import Lion
from .muon import Muon

OURS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (Adafactor, Lion, Muon, ScheduleFreeAdamW)
}


def optimizer_class(row: OptimizerKind) -> Callable[..., torch.optim.Optimizer]:
    """Return the class that a row names."""
    return OURS.get(row.title) or getattr(torch.optim, row.title)
