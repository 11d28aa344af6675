"""Share state among the wrapped modules of one model, and show them plain local parameters.

A wrapped forward works on plain tensors, this rank's parts of the parameters, which rest as DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.calls import without_values
from meshwright.core.record import recall, wrap
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.torch_private import local_part, spec_of
from meshwright.distributed.weights.parts_tensor import placed

from . import functions
from .loss import LossOfLogits
from .sequence import Sequence


@dataclass
class LossRequest:
    """A loss that the head is to compute itself, in chunks, instead of logits.

    Attributes:
        labels: (rows, seq).
        loss: of a chunk's logits.
        chunks: in how many the tokens are cut.
        weights: (rows, seq), by which the tokens' losses are multiplied.
        result: the sum, once the head was called.
    """

    labels: Tensor
    loss: LossOfLogits
    chunks: int
    weights: Tensor | None = None
    result: Tensor | None = None


@dataclass
class LossSite:
    """The place where a model's head finds the request for a loss.

    Attributes:
        request: a loss, instead of logits.
    """

    request: LossRequest | None = None


@dataclass
class Runtime(LossSite):
    """State that the wrapped modules of one model share.

    Attributes:
        sequence: how activations between the blocks lie.
        logits: "whole": the model returns all logits on every rank; "own": those of this rank's part of the vocabulary.
        arriving: this rank's part of the embedding's output, on its way to the first block.
        deferred: summands that wait for the row-parallel layer that reduces them.
        own: modules whose parameters nobody sees as plain tensors, since what is wrapped around their forward
            computes with them.
    """

    sequence: Sequence = field(kw_only=True)
    logits: Literal["whole", "own"] = "whole"
    arriving: Tensor | None = None
    deferred: Tensor | None = None
    own: set[nn.Module] = field(default_factory=set)
    _standing_for: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def group(self) -> RankGroup:
        return self.sequence.group

    def stand_in(self, part: Tensor) -> Tensor:
        """Return a tensor of the whole sequence's shape that takes no memory, for code that asks for shapes only.

        Its values are not a number.
        """
        sequence = self.sequence
        if part.dim() == 2:
            shape = (sequence.rows * sequence.length(part.shape[0] // sequence.rows), part.shape[-1])
        else:
            shape = (part.shape[0], sequence.length(part.shape[1]), *part.shape[2:])
        made = without_values(part, shape)
        self._standing_for.append((made, part))
        return made

    def forget(self, made: Tensor | None) -> None:
        """A stand-in is no longer needed."""
        self._standing_for = [pair for pair in self._standing_for if pair[0] is not made]

    def behind(self, x: Tensor) -> Tensor:
        """Return what a stand-in stands for; any other tensor is itself."""
        return next((part for made, part in self._standing_for if made is x), x)


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return what the wrapped modules of a cut model share; None of one that is not cut."""
    return recall(model, Runtime)


def local(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's part, differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():  # which knows to_local and not what a DTensor is made of
        return parameter.to_local()
    return _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """``to_local`` in half the time: how the whole's gradient lies is known, and not derived anew."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        part = local_part(parameter)
        ctx.spec, ctx.strides = spec_of(parameter), part.stride()
        ctx.set_materialize_grads(False)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Tensor | None:
        (gradient,) = grad_outputs
        if gradient is None:
            return None
        if gradient.stride() != ctx.strides:  # the whole's strides follow from the part's
            gradient = gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)
        return placed(gradient, copy.copy(ctx.spec))  # a copy: the dispatcher may write into it


@dataclass(frozen=True)
class LocalView:
    """A parameter that is a plain tensor, this rank's part, while a forward runs.

    Attributes:
        home: the module that has it.
        summed_over: the group over which its gradient is summed as soon as it is there.
        gradient_factor: on its gradient.
    """

    home: nn.Module
    name: str
    summed_over: RankGroup | None = None
    gradient_factor: float = 1.0

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        summing: Iterable[str] = (),
        group: RankGroup | None = None,
        gradient_factor: float = 1.0,
    ) -> list[LocalView]:
        """Return all parameters of the module itself.

        The gradients of those in ``summing`` are summed over ``group``.
        """
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        return [cls(module, name, group if name in summing else None, gradient_factor) for name in names]

    def part(self, parameter: Tensor | None) -> Tensor | None:
        part = local(parameter)
        if part is not None and self.gradient_factor != 1.0:
            part = functions.scaled_gradient(part, self.gradient_factor)
        return part if part is None or self.summed_over is None else functions.summing_gradients(part, self.summed_over)


def use_local_parameters(module: nn.Module, views: Iterable[LocalView] | None = None) -> None:
    """While its forward runs, every module sees this rank's parts of some parameters as plain tensors.

    Those that a forward around this one has in place stay. Those that FSDP has not gathered are left to the unit that
    gathers them: its forward runs inside this one.

    Args:
        views: of which parameters, of this module or of any inside; by default the module's own.
    """
    found = tuple(LocalView.of(module) if views is None else views)

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_with_local_parameters(*args: Any, **kwargs: Any) -> Any:
            held: list[tuple[dict[str, Any], str]] = []
            try:
                for view in found:
                    place, parameter = view.home.__dict__, view.home._parameters[view.name]
                    if view.name not in place and (view.home is module or _is_gathered(parameter)):
                        place[view.name] = view.part(parameter)
                        held.append((place, view.name))
                return forward(*args, **kwargs)
            finally:
                for place, name in held:
                    place.pop(name, None)

        return forward_with_local_parameters

    wrap(module, make, "local parameters")


def _is_gathered(parameter: Tensor | None) -> bool:
    """Tell whether it lies in parts over no axis but the tensor axis."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1
