"""Change one call of a module: its arguments, the parameters that it sees, tensors of which only the shape is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


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
