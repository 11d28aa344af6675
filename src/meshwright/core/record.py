"""Keep on a module, under one attribute, what this library knows of the module and did to it.

A record holds one value of each type, and a line for each change to how the module computes, in the order of the
changes. ``print(model)`` shows the lines. A copy of a module begins with the record of the original; what is then
remembered of one is not remembered of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

ATTRIBUTE = "_meshwright"
Value = TypeVar("Value")
Forward = Callable[..., Any]


def remember(module: nn.Module, value: object) -> None:
    """Keep a value on the module, in place of one of the same type."""
    values, changes = _record(module)
    module.__dict__[ATTRIBUTE] = ({**values, type(value): value}, changes)


def recall(module: nn.Module, kind: type[Value]) -> Value | None:
    """Return the value of this very type that is kept on the module."""
    return _record(module)[0].get(kind)


def values_of(module: nn.Module) -> Mapping[type, Any]:
    """Return all values that are kept on the module now, by their types."""
    return _record(module)[0]


def changes_of(module: nn.Module) -> tuple[str, ...]:
    """List what was done to how the module computes, in words; the last was done last and acts first."""
    return _record(module)[1]


def note(module: nn.Module, change: str) -> None:
    """Add a line on how the module computes from now on, which ``print(model)`` shows."""
    values, changes = _record(module)
    module.__dict__[ATTRIBUTE] = (values, (*changes, change))
    if "extra_repr" not in module.__dict__:
        module.__dict__["extra_repr"] = _Description(module)


def wrap(module: nn.Module, made: Forward, change: str) -> None:
    """Replace the module's forward by a function that was made for it, which may call that forward; note the change.

    The new function keeps its own name, so that a debugger and a traceback show which technique runs; signature and
    documentation are those of the forward that it wraps.
    """
    module.forward = functools.update_wrapper(made, module.forward, assigned=("__doc__", "__annotations__"))
    note(module, change)


class _Description:
    """A module's ``extra_repr``, with the lines of its record."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self) -> str:
        own = type(self.module).extra_repr(self.module)
        return ", ".join([*([own] if own else []), *dict.fromkeys(changes_of(self.module))])


def _record(module: nn.Module) -> tuple[dict[type, Any], tuple[str, ...]]:
    return module.__dict__.get(ATTRIBUTE, ({}, ()))


class holding:
    """Replaces a module's own parameters by the given tensors inside the context."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor | None]):
        self._held, self._tensors = module.__dict__, tensors  # Python finds these before the parameters

    def __enter__(self) -> None:
        self._held.update(self._tensors)

    def __exit__(self, *error: object) -> None:
        for name in self._tensors:
            self._held.pop(name, None)


def argument(args: tuple, kwargs: dict[str, Any], key: int | str) -> Any:
    """Return a positional argument by its number, or one by name."""
    return args[key] if isinstance(key, int) else kwargs[key]


def with_arguments(args: tuple, kwargs: dict[str, Any], given: dict[int | str, Tensor]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments with some of them replaced."""
    listed, named = list(args), dict(kwargs)
    for key, value in given.items():
        (listed if isinstance(key, int) else named)[key] = value  # type: ignore[index]
    return tuple(listed), named


def without_values(like: Tensor, shape: Iterable[int]) -> Tensor:
    """Return a tensor of the given shape that takes no memory; its values are NaN, so that reading them shows."""
    return like.detach().new_full((1,), float("nan")).expand(*shape)


def show_computed(deferred: Tensor, part: Tensor) -> None:
    """Keep on a tensor without values what a module computed in its place, for whom observes the module."""
    deferred.computed = part  # type: ignore[attr-defined]


def computed(output: Any) -> Any:
    """Return what was computed in the place of a module's output, or the output itself."""
    return getattr(output, "__dict__", {}).get("computed", output)
