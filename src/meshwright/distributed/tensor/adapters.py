"""Compute linear layers with adapters on one rank of a tensor-parallel group.

The module that adds an adapter's output to its host's runs unchanged, on this rank's parts of the weights. So dropout,
scales, casts, several adapters and disabled adapters work as their library wrote them, and the messages are the same as
without adapters: the sequence is gathered before the module, or its partial sums are reduced after it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.record import wrap
from meshwright.distributed.products import agreed_linear

from . import functions
from .layers import ColumnLayer, Reduction, Runtime, behind, collect_deferred


class GatheredInput:
    """Gathers one input for several column-parallel layers, some with adapters, and gives each the whole sequence.

    Adapters save the whole input for backward. An adapter's first layer is whole on all ranks, and each rank computes a
    partial gradient of it.
    """

    def __init__(self, runtime: Runtime, modules: list[nn.Module]):
        self.runtime, self.modules = runtime, modules
        self._taken: Tensor | None = None
        self._whole: Tensor | None = None
        self._served: set[int] = set()
        for number, module in enumerate(modules):
            self._wrap_module(module, number)

    def _wrap_module(self, module: nn.Module, number: int) -> None:
        forward = module.forward

        def gathered_input_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(self.whole(number, x), *args, **kwargs)

        wrap(module, gathered_input_forward, f"input gathered over tp {self.runtime.group.size}")

    def whole(self, number: int, x: Tensor) -> Tensor:
        """Return the whole input of the module with this number, of which ``x`` is this rank's part."""
        x = behind(x)
        if self._taken is not x or number in self._served or self._whole is None:
            self._taken, self._whole = x, functions.gathered(x, self.runtime.sequence)
            self._served.clear()
        self._served.add(number)
        whole = self._whole
        if len(self._served) == len(self.modules):
            self._taken = self._whole = None
        return whole


def local_summand(layer: ColumnLayer, runtime: Runtime, *, sums_at_once: bool) -> None:
    """Make a row-parallel layer, or the first layer of an adapter beside it, return a partial sum over the ranks.

    The first rank alone adds the bias, so that its gradient is a sum over the ranks.
    """

    def partial_sum_forward(x: Tensor) -> Tensor:
        weight, bias = layer.tensors(runtime)
        if bias is not None:
            bias = functions.summing_gradients(bias, runtime.group) if sums_at_once else bias
            # every rank needs a gradient, or the sum over the ranks would wait for one
            bias = bias if runtime.group.rank == 0 else bias * 0
        return agreed_linear(x, weight, bias, layer.way, runtime.group)

    wrap(layer.module, partial_sum_forward, f"partial sums over tp {runtime.group.size}")


def reduce_behind(around: nn.Module, runtime: Runtime, reduction: Reduction) -> None:
    """Reduce the partial sums that the module around a row-parallel layer and its adapters returns."""

    forward = around.forward

    def reduced_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        summand = forward(x, *args, **kwargs)
        if reduction.defers:
            return collect_deferred(runtime, x, summand, None, begins=reduction.begins)
        others = runtime.deferred if reduction.takes_deferred else None
        runtime.deferred = None if reduction.takes_deferred else runtime.deferred
        whole = summand if others is None else summand + others.view(summand.shape)
        return functions.reduced(whole, runtime.sequence)

    wrap(around, reduced_forward, f"summed over tp {runtime.group.size}")


def refuse_idle(module: nn.Module, path: str) -> None:
    """Refuse calls of an adapter that was switched off when the model was cut: it was left whole."""

    def refused_forward(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{path} is an adapter that was switched off when the model was cut for tensor parallelism, so it was"
            f" left whole and cannot"
            f" be used now. Switch on the adapters that you want to use, all of them, before you lay out the model."
        )

    wrap(module, refused_forward, "switched off when the model was cut")
