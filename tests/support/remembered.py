"""What a process measured of a model it remembers for equal ones: many tests lay out the same few models, on many ranks, in each dtype.

Only how a model can be cut is remembered, never that a plan was proven: every rank rehearses every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.introspection import facts
from meshwright.introspection.structure import Measured, measured

_KNOWN: dict[tuple, Measured] = {}


@dataclass(frozen=True)
class Remembering:
    """A job for workers, in which equal models are measured once for all jobs of a process."""

    job: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        facts.measured = _measured_once
        return self.job(*args)


def _measured_once(model: nn.Module, arguments: dict[str, str | None], ranks: int) -> Measured:
    """Models are equal whose modules, parameters and configs are; one without a config may hold anything, and is measured."""
    config = getattr(model, "config", None)
    if config is None:
        return measured(model, arguments, ranks)
    modules = tuple((path, type(module), str(vars(module).get("forward"))) for path, module in model.named_modules())
    parameters = tuple((name, p.shape, p.dtype) for name, p in model.named_parameters(remove_duplicate=False))
    ties = tuple(name for name, _ in model.named_parameters())
    key = (modules, parameters, ties, str(config), tuple(arguments.items()), ranks)
    if key not in _KNOWN:
        _KNOWN[key] = measured(model, arguments, ranks)
    return _KNOWN[key]
