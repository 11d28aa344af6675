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

from .kept import streams


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Compile the planned modules in place; torch compiles each at its first call."""
    for name in plan.compiled:
        module = model.get_submodule(name)
        keep_hooks_eager(module)
        module.compile(**dict(plan.compile_options))
        note(module, "compiled")
        if plan.activation_memory_budget is not None:
            _compile_within(module, plan.activation_memory_budget)
    return model


def _compile_within(module: nn.Module, budget: float) -> None:
    """Limit the activations that a module's compiled calls save for backward to this fraction.

    The partitioner chooses them (min cut, arXiv 2302.05442, and a knapsack over the costs). It would recompute random
    operators with other numbers (torch 2.13 on the CPU), so a block that draws random numbers is refused.

    Raises:
        UnsupportedError: in the first forward with gradients, if the block draws random numbers.
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
    """Exclude the hooks of earlier techniques on the module itself from compilation.

    torch would compile each of them alone, and anew for every number that it holds (a seed, a length).
    """
    for hooks in forward_hooks(module):
        for key, hook in hooks.items():
            hooks[key] = torch.compiler.disable(hook)


def graph_breaks() -> dict[str, int]:
    """Count the graph breaks of all modules compiled in this process, by reason in torch's words."""
    found: dict[str, int] = {}
    for reason, times in graph_break_counts().items():
        what, *more = [line.strip() for line in reason.splitlines() if line.strip()]
        why = next((line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")), "")
        text = f"{what} ({why})" if why else what
        found[text] = found.get(text, 0) + times
    return found


def graph_breaks_text() -> str:
    """Return the graph breaks as text for people; empty if there are none."""
    lines = [f"  {times} × {reason}" for reason, times in sorted(graph_breaks().items(), key=lambda one: -one[1])]
    return (
        "\n".join(["compiled blocks fall apart into several graphs (what is between them runs uncompiled):", *lines])
        if lines
        else ""
    )
