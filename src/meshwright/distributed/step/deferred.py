"""Defer weight gradients to the second half of a split backward (zero bubble pipelines, arXiv 2401.10241).

The first half is an ordinary backward in which linear layers pass on their input's gradient, and record input and
output gradient for later. So a recomputed block is recomputed once, and only the inputs of the second half are saved.
Other parameters (norms, biases, embeddings) get their gradients in the first half: they cost little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.record import wrap
from meshwright.distributed.products import Products, products_of


class DeferredGradients:
    """The deferred gradients of one stage; ``waiting``: deferred work by microbatch."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] | None = None
        self.waiting: dict[int, list[Callable[[], None]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether gradients are deferred at present."""
        return self._open is not None

    def begin(self, microbatch: int) -> None:
        """Begin to defer gradients."""
        self._open = self.waiting.setdefault(microbatch, [])

    def end(self) -> None:
        self._open = None

    def put_off(self, work: Callable[[], None]) -> None:
        assert self._open is not None
        self._open.append(work)

    @torch.no_grad()
    def do(self, microbatch: int) -> None:
        """Compute the gradients deferred in the backward of a microbatch, without recording, as in any backward."""
        work = self.waiting.pop(microbatch, [])
        work.reverse()
        while work:  # frees the tensors of each as soon as it is done
            work.pop()()

    def forget(self) -> None:
        self._open = None
        self.waiting.clear()


def defer_linear(module: nn.Module, transposed: bool, deferred: DeferredGradients) -> None:
    """Let a linear layer, whose weight may be stored (in, out), defer its gradient where ``deferred`` is open."""
    way = products_of(module, transposed)

    forward = module.forward

    def deferring_linear_forward(x: Tensor) -> Tensor:
        weight = module.weight
        if not (torch.is_grad_enabled() and isinstance(weight, Tensor) and weight.requires_grad):
            return forward(x)
        return _DeferredLinear.apply(x, weight, getattr(module, "bias", None), way, deferred)

    wrap(module, deferring_linear_forward, "weight gradient deferred")


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: Products, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        # not saved: recomputation would return another tensor, whose gradient is not asked for
        ctx.weight, ctx.way, ctx.deferred = weight, way, deferred
        return way.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        (x,) = ctx.saved_tensors
        weight, way = ctx.weight, ctx.way
        grad_x = way.of_input(gradient, weight) if ctx.needs_input_grad[0] else None
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad_weight = None
        if ctx.deferred.is_open:

            @torch.no_grad()
            def accumulate() -> None:
                found = way.of_weight(gradient, x)
                weight.grad = found if weight.grad is None else weight.grad.add_(found)

            ctx.deferred.put_off(accumulate)
        else:
            grad_weight = way.of_weight(gradient, x)
        return grad_x, grad_weight, grad_bias, None, None
