"""Make a model, its inputs and its peer ranks from fake tensors, which have shapes but no memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.torch_private import GROUPED_PRODUCT, FakeTensorMode, TorchDispatchMode, tree_map
from meshwright.distributed.exchange.ranks import MessagingRanks, Wait

GROUPED = {GROUPED_PRODUCT}
"""Operators that torch limits to bfloat16 on fake tensors, although their kernels take other dtypes too."""


class FakeRanks(MessagingRanks):
    """The first rank of a tensor axis without its peers: messages have buffers, but are not sent.

    Args:
        note_buffers: callback that receives the send and receive buffers of each message.
    """

    def __init__(self, size: int, note_buffers: Callable[[Iterable[Tensor]], None]):
        self.rank, self.size, self._note_buffers = 0, size, note_buffers

    def gather_into(self, parts: Tensor, x: Tensor, *, begins: bool = False) -> Wait:
        self._note_buffers((parts, x))
        return _nothing

    def scatter_into(self, mine: Tensor, parts: Tensor, *, begins: bool = False) -> Wait:
        self._note_buffers((mine, parts))
        return _nothing

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self._note_buffers((x,))

    def trade_into(
        self, received: Tensor, x: Tensor, receives: Sequence[int], sends: Sequence[int], *, begins: bool = False
    ) -> Wait:
        self._note_buffers((received, x))
        return _nothing

    def pass_into(self, received: Tensor, x: Tensor, shift: int) -> Wait:
        self._note_buffers((received, x))
        return _nothing


def _nothing() -> None:
    """Wait for nothing: no message was sent."""


PATIENCE = 100_000
"""Largest number of operators in a dry run, about ten seconds; a large model has a tenth of it."""


@contextmanager
def imagining(*, experts: bool) -> Iterator[None]:
    """Make every tensor created inside fake.

    Args:
        experts: whether the model may compute grouped products.

    Raises:
        DryRunError: the step has more than ``PATIENCE`` operators, like a Python loop over tokens.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Patience())
        if experts:
            stack.enter_context(_GroupedProducts())
        yield


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random states of torch (CPU), numpy and Python on exit."""
    own, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that a dry run of a copy of ``model`` gives no gradients to the original, and restore them if it does.

    Functions that were set on a copied module may still refer to the original.

    Raises:
        DryRunError: a gradient of the original changed.
    """
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        touched = [parameter for parameter, gradient in before if parameter.grad is not gradient]
        for parameter, gradient in before:
            parameter.grad = gradient
    if touched:
        raise DryRunError(
            "a function that was set on one of its modules computes with the model itself, but the dry run uses a copy"
        )


class DryRunError(Exception):
    """Raised if a model cannot be dry-run; the text gives the reason."""


class _Patience(TorchDispatchMode):
    """Limits the number of operators to ``PATIENCE``."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._operators += 1
        if self._operators > PATIENCE:
            raise DryRunError(f"its step has more than {PATIENCE:,} operators, too many for a dry run")
        return func(*args, **(kwargs or {}))


class _GroupedProducts(TorchDispatchMode):
    """Gives grouped products their shapes in every dtype, without computing them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in GROUPED:
            return func(*args, **(kwargs or {}))
        first, second = args[:2]
        if first.dim() == second.dim() == 2:  # a weight's gradient: as many products as there are groups
            groups = (args[2] if len(args) > 2 else (kwargs or {})["offs"]).shape[0]
            return first.new_empty((groups, first.shape[0], second.shape[1]))
        return first.new_empty((*first.shape[:-1], second.shape[-1]))


def without_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace a module's parameters and buffers by fake CPU tensors, floating-point parameters in ``dtype``.

    Call this inside ``imagining``.
    """
    made: dict[int, tuple[Tensor, Any]] = {}
    for holder in module.modules():
        places: tuple[dict[str, Any], ...] = holder._parameters, holder._buffers
        for held in places:
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _here(tensor, dtype)  # held: else its id could be reused
                    held[name] = made[id(tensor)][1]


def _here(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(torch.empty(tensor.shape, dtype=kind), tensor.requires_grad)


def casting(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point arguments, as a sharded unit does in mixed precision."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return tree_map(cast, (args, kwargs))

    module.register_forward_pre_hook(enter, with_kwargs=True)
