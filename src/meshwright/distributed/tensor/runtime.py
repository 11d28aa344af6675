"""What the wrapped modules of one model share, and how a module is wrapped: its forward is replaced in place, and names stay.

A wrapped forward works on plain tensors, this rank's parts of the parameters, which rest as DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import functions
from .functions import Sequence
from .group import TensorGroup
from .loss import LossOfLogits


@dataclass
class LossRequest:
    """A loss that the head is to compute itself, in chunks, instead of logits.

    Attributes:
        labels: (rows, seq).
        loss: of a chunk's logits.
        chunks: in how many the tokens are cut.
        result: the sum, once the head was called.
    """

    labels: Tensor
    loss: LossOfLogits
    chunks: int
    result: Tensor | None = None


@dataclass
class LossSite:
    """Where a model's head is told what is wanted of it.

    Attributes:
        request: a loss, instead of logits.
    """

    request: LossRequest | None = None


@dataclass
class Runtime(LossSite):
    """What the wrapped modules of one model share.

    Attributes:
        sequence: how activations between the blocks lie.
        logits: "whole": the model returns all logits on every rank; "own": those of this rank's part of the vocabulary.
        arriving: this rank's part of the embedding's output, on its way to the first block.
        deferred: summands that wait for the row-parallel layer that reduces them.
    """

    sequence: Sequence = field(kw_only=True)
    logits: Literal["whole", "own"] = "whole"
    arriving: Tensor | None = None
    deferred: Tensor | None = None
    _standing_for: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def group(self) -> TensorGroup:
        return self.sequence.group

    def stand_in(self, part: Tensor) -> Tensor:
        """A tensor of the whole sequence's shape that takes no memory, for code that asks for shapes only; its values are not a number."""
        if part.dim() == 2:
            shape = (self.sequence.rows * self.sequence.length, part.shape[-1])
        else:
            shape = (part.shape[0], self.sequence.length, *part.shape[2:])
        made = part.detach().new_full((1,), torch.nan).expand(shape)
        self._standing_for.append((made, part))
        return made

    def forget(self, made: Tensor | None) -> None:
        """A stand-in is no longer needed."""
        self._standing_for = [pair for pair in self._standing_for if pair[0] is not made]

    def behind(self, x: Tensor) -> Tensor:
        """What a stand-in stands for; any other tensor is itself."""
        return next((part for made, part in self._standing_for if made is x), x)


def runtime_of(model: nn.Module) -> Runtime | None:
    """What the wrapped modules of a cut model share; None of one that is not cut."""
    return model.__dict__.get("_meshwright_tensor")


def local(parameter: Tensor | None) -> Tensor | None:
    """This rank's part, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def wrap(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the module's forward by what ``make`` makes of it."""
    forward = module.forward
    module.forward = functools.wraps(forward)(make(forward))


def use_local_parameters(module: nn.Module, summing: tuple[str, ...] = (), group: TensorGroup | None = None) -> None:
    """While its forward runs, the module sees this rank's parts of its own parameters as plain tensors.

    Args:
        summing: parameters whose gradients are summed over ``group`` as soon as they are there.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            held = module.__dict__  # found before the parameter of the same name
            try:
                for name in names:
                    part = local(module._parameters[name])
                    held[name] = part
                    if name in summing and part is not None and group is not None:
                        held[name] = functions.summing_gradients(part, group)
                return forward(*args, **kwargs)
            finally:
                for name in names:
                    held.pop(name, None)

        return run

    wrap(module, make)


def argument(args: tuple, kwargs: dict[str, Any], key: int | str) -> Any:
    return args[key] if isinstance(key, int) else kwargs[key]


def with_arguments(args: tuple, kwargs: dict[str, Any], given: dict[int | str, Tensor]) -> tuple[tuple, dict[str, Any]]:
    listed, named = list(args), dict(kwargs)
    for key, value in given.items():
        (listed if isinstance(key, int) else named)[key] = value  # type: ignore[index]
    return tuple(listed), named
