"""Observe a model's operations between its head and the logits (a soft cap, a scale), to replay them on any piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.torch_private import EagerDispatchMode
from meshwright.introspection.outputs import logits_of

SHAPELESS = (
    "aten.slice.Tensor",
    "aten.alias.default",
    "aten.detach.default",
    "aten.clone.default",
    "aten.view.default",
)
"""Operations that do nothing in a tail as long as they preserve the shape."""


@dataclass(frozen=True)
class TailStep:
    """One pointwise operation on the logits, argument ``place``: aten's name, and the other arguments."""

    operation: str
    place: int
    arguments: tuple[float | int | bool | str | None, ...]

    def __str__(self) -> str:
        listed = ", ".join(str(value) for value in self.arguments)
        return f"{self.operation.split('.')[1]}({listed})" if listed else self.operation.split(".")[1]


@dataclass(frozen=True)
class Tail:
    """The steps in order, or ``obstacle``: the operation that cannot be applied piece by piece."""

    steps: tuple[TailStep, ...] = ()
    obstacle: str = ""

    def __call__(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            operation = _operation(step.operation)
            logits = operation(*step.arguments[: step.place], logits, *step.arguments[step.place :])
        return logits


def find_tail(model: nn.Module, head: str, inputs: dict[str, Any]) -> Tail:
    """Observe one forward from the head's output to the logits."""
    watch = _LogitOperations()

    def begin(module: nn.Module, args: tuple, output: Any) -> None:
        watch.begin(output)

    handle = model.get_submodule(head).register_forward_hook(begin)
    try:
        with torch.no_grad(), watch:
            output = model(**inputs)
    finally:
        handle.remove()
    return watch.tail(logits_of(output))


class _LogitOperations(EagerDispatchMode):
    """Records the operations on the head's output."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_to: dict[int, tuple[TailStep, ...]] = {}
        self.obstacles: dict[int, str] = {}
        self.kept: list[Tensor] = []

    def begin(self, output: Tensor) -> None:
        self.steps_to[id(output)] = ()
        self.kept.append(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        followed = [i for i, value in enumerate(args) if isinstance(value, Tensor) and id(value) in self.steps_to]
        if followed and isinstance(result, Tensor):
            self._note(func, args, kwargs or {}, followed, result)
        return result

    def _note(self, func: Any, args: tuple, kwargs: dict, followed: list[int], result: Tensor) -> None:
        place = followed[0]
        source, name = args[place], str(func)
        others = (*args[:place], *args[place + 1 :], *kwargs.values())
        self.kept.append(result)
        self.steps_to[id(result)] = self.steps_to[id(source)]
        self.obstacles[id(result)] = self.obstacles.get(id(source), "")
        if name in SHAPELESS and result.shape == source.shape:
            return
        if name == "aten._to_copy.default":
            return  # the loss computes in at least fp32 anyway
        plain = all(value is None or isinstance(value, (int, float, bool)) for value in others) and not kwargs
        if torch.Tag.pointwise in func.tags and plain and len(followed) == 1 and not name.split(".")[1].endswith("_"):
            self.steps_to[id(result)] += (TailStep(name, place, others),)
        else:
            self.obstacles[id(result)] = self.obstacles[id(result)] or name

    def tail(self, logits: Tensor) -> Tail:
        if id(logits) not in self.steps_to:
            return Tail(obstacle="something that does not follow from the head's output alone")
        if self.obstacles.get(id(logits)):
            return Tail(obstacle=self.obstacles[id(logits)])
        return Tail(self.steps_to[id(logits)])


def _operation(name: str) -> Any:
    namespace, operation, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)
