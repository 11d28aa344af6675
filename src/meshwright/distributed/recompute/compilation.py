"""Compile repeated blocks one at a time and in place: names stay, equal blocks share a graph."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.record import note
from meshwright.core.torch_private import (
    compiled_call,
    forward_hooks,
    graph_break_counts,
    set_compiled_call,
    with_activation_budget,
)
from meshwright.planning.plan import Plan

from .random_streams import streams


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Compile the planned modules in place; the compilation itself happens at their first call."""
    for name in plan.compiled:
        module = model.get_submodule(name)
        keep_hooks_eager(module)
        module.compile(**dict(plan.compile_options))
        note(module, "compiled")
        if plan.activation_memory_budget is not None:
            _compile_within(module, plan.activation_memory_budget)
    return model


def _compile_within(module: nn.Module, budget: float) -> None:
    """Let whatever the module's calls compile keep no more than this share of its activations for backward.

    The partitioner chooses what (min cut, arXiv 2302.05442, and a knapsack over what it costs). It would recompute
    random operators with other numbers (torch 2.13 on the CPU), so a block that draws any is refused.

    Raises:
        UnsupportedError: in the first forward that is trained, if the block draws random numbers.
    """
    compiled = compiled_call(module)
    assert compiled is not None

    @functools.wraps(compiled)
    def within(*args: Any, **kwargs: Any) -> Any:
        before = streams()
        with with_activation_budget(budget):
            output = compiled(*args, **kwargs)
        if torch.is_grad_enabled() and any(
            not torch.equal(state, before[device]) for device, state in streams().items() if device in before
        ):
            raise UnsupportedError(
                f"techniques.activation_checkpointing = memory_budget: {type(module).__name__} draws random numbers,"
                f" and the compiler could"
                f" draw others when it recomputes. Use selective_op or full, or switch dropout off."
            )
        return output

    set_compiled_call(module, within)


def keep_hooks_eager(module: nn.Module) -> None:
    """Hooks that earlier techniques left on the module itself run as they are: torch compiles each of them alone, and
    anew with every number that it holds (a seed, a length).
    """
    for hooks in forward_hooks(module):
        for key, hook in hooks.items():
            hooks[key] = torch.compiler.disable(hook)


def graph_breaks() -> dict[str, int]:
    """Tell where what this process compiled falls apart into several graphs, in torch's words, and how often."""
    found: dict[str, int] = {}
    for reason, times in graph_break_counts().items():
        what, *more = [line.strip() for line in reason.splitlines() if line.strip()]
        why = next((line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")), "")
        said = f"{what} ({why})" if why else what
        found[said] = found.get(said, 0) + times
    return found


def graph_breaks_text() -> str:
    """Return the same for people; empty where there are none."""
    lines = [f"  {times} × {reason}" for reason, times in sorted(graph_breaks().items(), key=lambda one: -one[1])]
    return (
        "\n".join(["compiled blocks fall apart into several graphs (what is between them runs uncompiled):", *lines])
        if lines
        else ""
    )
