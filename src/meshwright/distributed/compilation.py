"""torch.compile, one repeated block at a time and in place: names stay, and equal blocks share one compilation."""

from __future__ import annotations

from torch import nn

from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Compile the planned modules in place; the compilation itself happens at their first call."""
    for name in plan.compiled:
        model.get_submodule(name).compile(**dict(plan.compile_options))
    return model
