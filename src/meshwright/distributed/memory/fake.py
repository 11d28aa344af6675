"""Make a model, its inputs and the other ranks without memory: tensors with shapes and no values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.torch_private import GROUPED_PRODUCT, FakeTensorMode, TorchDispatchMode, tree_map
from meshwright.distributed.tensor.group import MessagingRanks

GROUPED = {GROUPED_PRODUCT}
"""To tensors without memory torch says that it takes bfloat16 alone; the kernels take more."""


class FakeRanks(MessagingRanks):
    """The first of several ranks of the tensor axis, as alone as it is: messages have their buffers, and nobody
    answers.

    Args:
        told: of the buffers that are sent and filled.
    """

    def __init__(self, size: int, told: Callable[[Iterable[Tensor]], None]):
        self.rank, self.size, self._told = 0, size, told

    def gather_into(self, parts: Tensor, x: Tensor) -> None:
        self._told((parts, x))

    def scatter_into(self, mine: Tensor, parts: Tensor) -> None:
        self._told((mine, parts))

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self._told((x,))


PATIENCE = 100_000
"""Operators of a play; so many take some ten seconds. A large model has a tenth of them."""


@contextmanager
def imagining(*, experts: bool) -> Iterator[None]:
    """Inside, whatever is made has no memory.

    Args:
        experts: there may be grouped products.

    Raises:
        Unplayable: a forward that goes through its tokens one by one, in Python, would keep everybody waiting.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Patience())
        if experts:
            stack.enter_context(_GroupedProducts())
        yield


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Inside, whoever draws random numbers, of torch on the CPU, numpy or Python, takes none from those who come
    after.
    """
    own, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A copy is played, but functions that were put on a module hold on to the original.

    Gradients of that are put back.

    Raises:
        Unplayable: there were some.
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
            "a function that was put on one of its modules computes with the model itself, where a copy is played"
        )


class DryRunError(Exception):
    """A model cannot be dry-run; the text says why."""


class _Patience(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._operators += 1
        if self._operators > PATIENCE:
            raise DryRunError(f"its step has more than {PATIENCE:,} operators, which would take too long to play")
        return func(*args, **(kwargs or {}))


class _GroupedProducts(TorchDispatchMode):
    """Says of grouped products what shape they have, in every dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in GROUPED:
            return func(*args, **(kwargs or {}))
        first, second = args[:2]
        if first.dim() == second.dim() == 2:  # a weight's gradient: as many products as there are groups
            groups = (args[2] if len(args) > 2 else (kwargs or {})["offs"]).shape[0]
            return first.new_empty((groups, first.shape[0], second.shape[1]))
        return first.new_empty((*first.shape[:-1], second.shape[-1]))


def without_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace, inside ``imagining``, a module's parameters and buffers: as on the CPU, floating point parameters in
    ``dtype``.
    """
    made: dict[int, tuple[Tensor, Any]] = {}
    for holder in module.modules():
        places: tuple[dict[str, Any], ...] = holder._parameters, holder._buffers
        for held in places:
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _here(tensor, dtype)  # the old one keeps its number
                    held[name] = made[id(tensor)][1]


def _here(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(torch.empty(tensor.shape, dtype=kind), tensor.requires_grad)


def casting(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating point arguments, as a sharded unit of mixed precision does."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return tree_map(cast, (args, kwargs))

    module.register_forward_pre_hook(enter, with_kwargs=True)
