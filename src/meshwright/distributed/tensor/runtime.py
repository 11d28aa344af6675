"""Share state among the wrapped modules of one model, and give them plain local parameters.

A wrapped forward computes with plain tensors, this rank's parts; outside forwards the parameters are DTensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.calls import without_values
from meshwright.core.record import recall, wrap
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.quantize.nf4 import QuantizedLinear
from meshwright.distributed.torch_private import local_part, spec_of
from meshwright.distributed.weights.parts_tensor import placed

from . import functions
from .loss import VocabularyShard
from .sequence import Sequence


@dataclass
class LossRequest:
    """A request that the head compute a loss itself, in chunks, instead of logits.

    Attributes:
        labels: (rows, seq).
        chunks: number of chunks into which the tokens are cut.
        weights: (rows, seq) factors of the tokens' losses.
        result: the summed loss, after the model was called.
    """

    labels: Tensor
    chunks: int
    weights: Tensor | None = None
    result: Tensor | None = None


@dataclass
class LossSite:
    """The place where a model's head finds a request for a loss.

    Attributes:
        request: the loss to compute instead of logits, or None.
        answer: what the model returns in place of the deferred logits that its head gave it, as a function of what it
            made of these; None where the head computed logits.
        shard: this rank's part of the vocabulary that the last answer is of; None: all of it.
    """

    request: LossRequest | None = None
    answer: Callable[[Tensor], Tensor] | None = None
    shard: VocabularyShard | None = None


@dataclass
class Runtime(LossSite):
    """State shared by the wrapped modules of one model.

    Attributes:
        sequence: how activations are laid out between the blocks.
        logits: "whole": the model returns all logits on every rank; "own": those of this rank's part of the vocabulary.
        arriving: this rank's part of the embedding's output, on its way to the first block.
        deferred: partial sums that wait for the row-parallel layer that reduces them.
        own: modules whose parameters are not replaced by plain tensors, since the wrapper of their forward computes
            with the local parts.
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

    def stand_in(self, part: Tensor, parts: int = 1) -> Tensor:
        """Return a tensor with the shape of the whole sequence that takes no memory, for code that only reads shapes.

        Its values are NaN. It has one of ``parts`` parts of the features.
        """
        sequence = self.sequence
        if not sequence.cut:
            shape = part.shape
        elif part.dim() == 2:
            shape = (sequence.rows * sequence.length(part.shape[0] // sequence.rows), part.shape[-1])
        else:
            shape = (part.shape[0], sequence.length(part.shape[1]), *part.shape[2:])
        made = without_values(part, (*shape[:-1], shape[-1] // parts))
        self._standing_for.append((made, part))
        return made

    def forget(self, made: Tensor | None) -> None:
        """Drop a stand-in that is no longer needed."""
        for number, (other, _) in enumerate(self._standing_for):
            if other is made:
                del self._standing_for[number]
                return

    def behind(self, x: Tensor) -> Tensor:
        """Return the tensor that a stand-in replaces, or ``x`` itself if it is no stand-in."""
        for made, part in self._standing_for:
            if made is x:
                return part
        return x


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the shared state of a model's wrapped modules, or None if the model is not cut."""
    return recall(model, Runtime)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiably."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():  # the compiler can trace to_local, but not the internals of a DTensor
        return parameter.to_local()
    return _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """``to_local`` in half the time: the layout of the whole gradient is known, and not derived anew."""

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
        if gradient.stride() != ctx.strides:  # the strides of the whole are derived from the part's
            gradient = gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)
        return placed(gradient, copy.copy(ctx.spec))  # a copy: the dispatcher may write into it


@dataclass(frozen=True)
class LocalView:
    """A parameter of which forwards see this rank's part as a plain tensor.

    Attributes:
        home: the module that has the parameter.
        summed_over: group over which its gradient is summed in the backward.
        gradient_factor: factor of its gradient.
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
        """Return views of all parameters of the module itself.

        The gradients of those in ``summing`` are summed over ``group``.
        """
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        return [cls(module, name, group if name in summing else None, gradient_factor) for name in names]

    @functools.cached_property
    def key(self) -> str:
        """The attribute that shows the part: of bytes one that other code does not read."""
        return "local_weight" if isinstance(self.home, QuantizedLinear) and self.name == "weight" else self.name

    def part(self, parameter: Tensor) -> Tensor:
        part = local(parameter)
        if self.gradient_factor != 1.0:
            part = functions.scaled_gradient(part, self.gradient_factor)
        return part if self.summed_over is None else functions.summing_gradients(part, self.summed_over)


def use_local_parameters(module: nn.Module, views: Iterable[LocalView] | None = None) -> None:
    """Show this rank's parts of some parameters as plain tensors to every module while the module's forward runs.

    Parameters that an outer forward already replaced stay as they are. Parameters that FSDP has not gathered are left
    to the unit that gathers them: its forward runs inside this one.

    Args:
        views: the parameters, of this module or of modules inside; by default all of the module's own.
    """
    found = tuple(LocalView.of(module) if views is None else views)

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_with_local_parameters(*args: Any, **kwargs: Any) -> Any:
            held: list[tuple[dict[str, Any], str]] = []
            try:
                for view in found:
                    place, parameter = view.home.__dict__, view.home._parameters[view.name]
                    if (
                        parameter is not None
                        and view.key not in place
                        and (view.home is module or _is_gathered(parameter))
                    ):
                        place[view.key] = view.part(parameter)
                        held.append((place, view.key))
                return forward(*args, **kwargs)
            finally:
                for place, name in held:
                    place.pop(name, None)

        return forward_with_local_parameters

    wrap(module, make, "local parameters")


def _is_gathered(parameter: Tensor | None) -> bool:
    """Return whether a parameter is cut over no axis but the tensor axis."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1
