"""torch.compile, one repeated block at a time and in place: names stay, and equal blocks share one compilation."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Compile the planned modules in place; the compilation itself happens at their first call."""
    for name in plan.compiled:
        module = model.get_submodule(name)
        keep_hooks_eager(module)
        module.compile(**dict(plan.compile_options))
    return model


def keep_hooks_eager(module: nn.Module) -> None:
    """Hooks that earlier techniques left on the module itself run as they are: torch compiles each of them alone, and anew with every
    number that it holds (a seed, a length)."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = torch.compiler.disable(hook)
